"""Running a plan: rows to logits, logits to tokens and to the scores of prompts.

Penalties, biases and masks are functions of a request's own tokens, row by row, so that batch mates
change nothing.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slackwater.engine.executor import Executor, RowBatch, SamplingColumns
from slackwater.engine.request import TopTokens
from slackwater.engine.scheduler import Scheduler, StepPlan, WeightGroup
from slackwater.engine.sequence import PromptScoring, Sequence
from slackwater.engine.slots import SlotTable, stream_keys, uniforms
from slackwater.model.sampling import Sampling
from slackwater.nets.causal_lm import CausalLM

_NEVER = float("-inf")


class Shaper:
    """Changes rows of logits by what their slots' requests ask for."""

    def __init__(self, slots: SlotTable, scheduler: Scheduler) -> None:
        self._slots, self._scheduler = slots, scheduler

    @torch.inference_mode()
    def shape(self, slots: NDArray[np.int64], logits: Tensor) -> Tensor:
        """`[len(slots), vocab]` float32 of its own, with `-inf` for what may not be drawn."""
        rows = logits.float().clone()
        sequences = [self._scheduler.sequence(slot) for slot in slots.tolist()]
        for place, (slot, sequence) in enumerate(zip(slots.tolist(), sequences, strict=True)):
            self._shape_row(rows[place], slot, sequence)
        self._guide(rows, sequences)
        for place, sequence in enumerate(sequences):
            params = sequence.request.params
            if params.min_p and params.temperature > 0:
                row = rows[place]
                least = row.max() + params.temperature * float(np.log(params.min_p))
                row.masked_fill_(row < least, _NEVER)
        return rows

    def _shape_row(self, row: Tensor, slot: int, sequence: Sequence) -> None:
        params, first = sequence.request.params, len(sequence.request.prompt)
        known = self._slots.tokens[slot, : int(self._slots.length[slot])]
        if params.penalised:
            _penalise(row, params, known, first)
        if params.logit_bias:
            tokens, biases = zip(*params.logit_bias, strict=True)
            row.index_add_(0, _ids(row, tokens), row.new_tensor(biases))
        if len(known) - first < params.min_tokens and sequence.stop_ids:
            row.index_fill_(0, _ids(row, sorted(sequence.stop_ids)), _NEVER)
        if banned := _ends_of_bad_words(params.bad_words, known[first:]):
            row.index_fill_(0, _ids(row, banned), _NEVER)
        if params.allowed_token_ids:
            allowed = _ids(row, params.allowed_token_ids)
            kept = row[allowed]
            row.fill_(_NEVER)
            row[allowed] = kept

    def _guide(self, rows: Tensor, sequences: list[Sequence]) -> None:
        """Mask all guided rows at once: packed bits travel, and are unpacked at the logits."""
        places = [i for i, sequence in enumerate(sequences) if sequence.guide is not None]
        if not places:
            return
        vocab = rows.shape[1]
        bits = np.zeros((len(places), -(-vocab // 32)), np.int32)
        for line, place in zip(bits, places, strict=True):
            guide = sequences[place].guide
            assert guide is not None
            guide.allow(line)
        sent = torch.from_numpy(bits).to(rows.device)
        at = torch.arange(32, device=rows.device, dtype=torch.int32)
        allowed = (sent[:, :, None] >> at).bitwise_and_(1).reshape(len(places), -1)[:, :vocab]
        where = torch.tensor(places, device=rows.device)
        rows[where] = rows[where].masked_fill_(allowed == 0, _NEVER)


def _ends_of_bad_words(words: ListLike[ListLike[int]], generated: NDArray[np.int32]) -> list[int]:
    """The tokens that would complete a bad word now."""
    longest = max((len(word) for word in words), default=1) - 1
    last = generated[max(len(generated) - longest, 0) :].tolist()
    return [word[-1] for word in words if _ends_with(last, word[:-1])]


def _ends_with(tokens: ListLike[int], end: ListLike[int]) -> bool:
    return not end or list(tokens[-len(end) :]) == list(end)


def _penalise(row: Tensor, params: Sampling, known: NDArray[np.int32], first: int) -> None:
    """Repetition scales all seen tokens' logits; presence and frequency lower generated ones."""
    if params.repetition_penalty != 1.0:
        seen = _ids(row, np.unique(known))
        values, penalty = row[seen], params.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    tokens, counts = np.unique(known[first:], return_counts=True)
    lowered = params.frequency_penalty * counts + params.presence_penalty
    if len(tokens) and lowered.any():
        row.index_add_(0, _ids(row, tokens), row.new_tensor(lowered), alpha=-1)


def _ids(row: Tensor, tokens: "NDArray[np.int32] | object") -> Tensor:
    return torch.from_numpy(np.asarray(tokens, np.int64)).to(row.device)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """New tokens by slot; `top` holds the likeliest ones of the slots that asked."""

    slots: NDArray[np.int64]
    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    top: dict[int, TopTokens]


NOTHING = SampledTokens(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32), {})


class Runner:
    """Takes a plan through the executor, one model after the other."""

    def __init__(
        self, slots: SlotTable, scheduler: Scheduler, executor: Executor, *, steps_ahead: bool
    ) -> None:
        self._slots, self._scheduler, self._executor = slots, scheduler, executor
        self._steps_ahead = steps_ahead
        self._shaper = Shaper(slots, scheduler)

    def run(self, plan: StepPlan) -> SampledTokens:
        """Compute the plan's tokens, score the prompts among them and sample where one is due."""
        parts = [self._run_group(plan, group) for group in self._scheduler.groups(plan)]
        if len(parts) == 1:
            return parts[0]
        return SampledTokens(
            np.concatenate([part.slots for part in parts]),
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            {slot: top for part in parts for slot, top in part.top.items()},
        )

    def warm_up(self, net: CausalLM) -> None:
        """Compile and try everything once, on the scratch block: no request shall wait for it."""
        tables = np.zeros_like(self._slots.tables[:1])
        one = np.ones(1, np.float32)
        half = np.full(1, 0.5, np.float32)
        columns = SamplingColumns(one, one, np.zeros(1, np.int64), half)
        for rows in (1, 2):
            places, slots = np.arange(rows), np.zeros(rows, np.int64)
            last = np.array([rows - 1])
            batch = RowBatch(slots, places, slots, last, (), decode_only=rows == 1)
            if rows == 1:
                self._executor.decode(net, batch, tables, columns)
            else:
                self._executor.sample(self._executor.logits(net, batch, tables), columns)

    def warm_decode(self, net: CausalLM, rows: ListLike[int], contexts: ListLike[int]) -> None:
        """Try decode steps of these sizes over these contexts: a device may capture them now."""
        tables = np.zeros_like(self._slots.tables[:1])
        longest = tables.shape[1] * self._slots.block_tokens
        for count in rows:
            ones, none = np.ones(count, np.float32), np.zeros(count, np.int64)
            columns = SamplingColumns(ones, ones, none, np.full(count, 0.5, np.float32))
            for context in contexts:
                places = np.full(count, min(context, longest) - 1)
                batch = RowBatch(none, places, none, np.arange(count), (), decode_only=True)
                self._executor.decode(net, batch, tables, columns)

    def _run_group(self, plan: StepPlan, group: WeightGroup) -> SampledTokens:
        slots, counts = plan.slots[group.start : group.stop], plan.counts[group.start : group.stop]
        batch, ends, due = self._rows(slots, counts, group)
        if batch.decode_only:  # nothing of a prompt is left to score
            columns, tables = self._columns(slots), self._slots.tables
            ahead = self._ahead(plan, len(slots), columns)
            logits, tokens, logprobs = self._executor.decode(
                group.net, batch, tables, columns, ahead
            )
            return self._drawn(slots, logits, columns, tokens, logprobs)
        logits = self._executor.logits(group.net, batch, self._slots.tables)
        scored = np.nonzero(self._slots.scored[slots])[0]
        if len(scored):
            self._score(slots, counts, ends, scored, batch, logits)
            logits = logits[torch.from_numpy(np.searchsorted(batch.wanted, ends[due]))]
        return self._sample(slots[due], logits) if len(due) else NOTHING

    def _ahead(
        self, plan: StepPlan, rows: int, columns: SamplingColumns
    ) -> NDArray[np.float32] | None:
        """The next step's uniform numbers, if it can begin before this one's tokens are seen."""
        table, slots = self._slots, plan.slots
        if not self._steps_ahead or rows != self._scheduler.running or self._scheduler.waiting:
            return None
        cut = (columns.top_k > 0) | (columns.top_p < 1)
        if cut.any() or table.shaped[slots].any() or table.top_tokens[slots].any():
            return None
        goes_on = table.length[slots] + 1 < table.limit[slots]
        if not goes_on.any() or not self._scheduler.hold_ahead(plan):
            return None
        return uniforms(table.key[slots], table.length[slots] + 1)

    def _rows(
        self, slots: NDArray[np.int64], counts: NDArray[np.int64], group: WeightGroup
    ) -> tuple[RowBatch, NDArray[np.int64], NDArray[np.int64]]:
        """The rows; where each slot's last row is; which slots are due for a new token."""
        table = self._slots
        computed, length = table.computed[slots], table.length[slots]
        total = int(counts.sum())
        decode_only = total == len(slots)
        due = np.nonzero((computed + counts == length) & (length < table.limit[slots]))[0]
        spans = [(a - group.start, b - group.start, adapter) for a, b, adapter in group.spans]
        if decode_only:
            ends, row_slots, positions = np.arange(total), slots, computed
        else:
            ends = np.cumsum(counts) - 1
            row_slots = np.repeat(slots, counts)
            firsts = np.repeat(computed - (ends + 1 - counts), counts)
            positions = firsts + np.arange(total)
            edges = np.concatenate(([0], ends + 1))
            spans = [(int(edges[a]), int(edges[b]), adapter) for a, b, adapter in spans]
        wanted = ends[due]
        if table.scored[slots].any():
            marked = np.repeat(table.scored[slots], counts)
            marked[wanted] = True
            wanted = np.nonzero(marked)[0]
        tokens = table.tokens[row_slots, positions].astype(np.int64)
        single = decode_only and len(due) == total
        return RowBatch(tokens, positions, row_slots, wanted, tuple(spans), single), ends, due

    def _sample(self, slots: NDArray[np.int64], logits: Tensor) -> SampledTokens:
        columns = self._columns(slots)
        tokens, logprobs = self._executor.sample(logits, columns)
        return self._drawn(slots, logits, columns, tokens, logprobs)

    def _columns(self, slots: NDArray[np.int64]) -> SamplingColumns:
        table = self._slots
        return SamplingColumns(
            table.temperature[slots],
            table.top_p[slots],
            table.top_k[slots],
            uniforms(table.key[slots], table.length[slots]),
        )

    def _drawn(
        self,
        slots: NDArray[np.int64],
        logits: Tensor,
        columns: SamplingColumns,
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
    ) -> SampledTokens:
        """What was sampled, with the rows drawn again that shape their logits."""
        shaped = np.nonzero(self._slots.shaped[slots])[0]
        if len(shaped):
            tokens, logprobs = tokens.copy(), logprobs.copy()
            self._sample_shaped(slots, logits, columns, shaped, tokens, logprobs)
        return SampledTokens(slots, tokens, logprobs, self._top(slots, logits))

    def _top(self, slots: NDArray[np.int64], logits: Tensor) -> dict[int, TopTokens]:
        """The likeliest tokens of the rows that asked for them."""
        table, top = self._slots, {}
        for row in np.nonzero(table.top_tokens[slots])[0].tolist():
            slot = int(slots[row])
            heat = float(table.temperature[slot]) or 1.0
            k = int(table.top_tokens[slot])
            top[slot] = top_tokens(torch.log_softmax(logits[row : row + 1] / heat, -1), k)
        return top

    def _sample_shaped(
        self,
        slots: NDArray[np.int64],
        logits: Tensor,
        columns: SamplingColumns,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
    ) -> None:
        """Draw these rows from their logits as shaped; log-probs stay the model's own."""
        plain = logits[torch.from_numpy(rows).to(logits.device)]
        shaped = self._shaper.shape(slots[rows], plain)
        chosen, _ = self._executor.sample(shaped, columns.take(rows))
        for place, row in enumerate(rows.tolist()):
            token = int(chosen[place])
            if shaped[place, token] == float("-inf"):  # by rounding, once in millions of draws
                token = int(shaped[place].argmax())
            heat = float(columns.temperature[row]) or 1.0
            own = torch.log_softmax(plain[place : place + 1].float() / heat, -1)
            tokens[row], logprobs[row] = token, float(own[0, token])

    def _score(
        self,
        slots: NDArray[np.int64],
        counts: NDArray[np.int64],
        ends: NDArray[np.int64],
        scored: NDArray[np.int64],
        batch: RowBatch,
        logits: Tensor,
    ) -> None:
        """Score the prompt tokens that these rows predict: row p gives position p + 1."""
        for place in scored.tolist():
            slot, stop = int(slots[place]), int(ends[place]) + 1
            sequence = self._scheduler.sequence(slot)
            first = int(self._slots.computed[slot])
            count = min(int(counts[place]), len(sequence.request.prompt) - 1 - first)
            if sequence.scoring is None or count <= 0:
                continue
            start = int(np.searchsorted(batch.wanted, stop - int(counts[place])))
            targets = self._slots.tokens[slot, first + 1 : first + 1 + count]
            fill_scores(sequence.scoring, first + 1, logits[start : start + count], targets)


def fill_scores(
    scoring: PromptScoring, position: int, logits: Tensor, targets: NDArray[np.int32]
) -> None:
    """Write the log-probs of `targets`, the tokens from `position` on."""
    logprobs = torch.log_softmax(logits.float(), -1)
    picked = torch.from_numpy(targets.astype(np.int64)).to(logprobs.device)
    chosen = logprobs.gather(1, picked[:, None])[:, 0]
    stop = position + len(targets)
    scoring.logprobs[position:stop] = chosen.cpu().numpy()
    if scoring.top is not None:
        found = top_tokens(logprobs, scoring.top.tokens.shape[1])
        scoring.top.tokens[position:stop] = found.tokens
        scoring.top.logprobs[position:stop] = found.logprobs
    for row, place in enumerate(range(position - 1, stop - 1)):
        if scoring.wanted and (scoring.wanted[place] >= 0).any():
            asked = np.maximum(scoring.wanted[place], 0)
            values = logprobs[row, torch.from_numpy(asked).to(logprobs.device)].cpu().numpy()
            scoring.targets[place][:] = np.where(scoring.wanted[place] >= 0, values, 0.0)
    if scoring.alternatives is not None:
        found = draws(logits.float(), logprobs, scoring, position)
        scoring.alternatives.tokens[position - 1 : stop - 1] = found.tokens
        scoring.alternatives.logprobs[position - 1 : stop - 1] = found.logprobs


def draws(logits: Tensor, logprobs: Tensor, scoring: PromptScoring, position: int) -> TopTokens:
    """Independent draws for each row, from a stream of their own, not the answer's."""
    assert scoring.alternatives is not None
    rows, k = logits.shape[0], scoring.alternatives.tokens.shape[1]
    if scoring.temperature > 0:
        running = torch.softmax(logits / scoring.temperature, -1).double().cumsum(-1)
        keys = np.repeat(stream_keys(np.array([(scoring.seed + 1) % 2**64], np.uint64)), rows * k)
        aims = uniforms(keys, np.arange(position * k, (position + rows) * k)).reshape(rows, k)
        aim = torch.from_numpy(aims).to(running) * running[:, -1:]
        ids = torch.searchsorted(running, aim, right=True).clamp_(max=logits.shape[1] - 1)
    else:
        ids = logits.argmax(-1, keepdim=True).expand(rows, k)
    values = logprobs.gather(1, ids)
    return TopTokens(ids.cpu().numpy().astype(np.uint32), values.cpu().numpy())


def top_tokens(logprobs: Tensor, k: int) -> TopTokens:
    """The `k` likeliest tokens of each row, likeliest first."""
    values, ids = logprobs.topk(k, dim=-1)
    return TopTokens(ids.cpu().numpy().astype(np.uint32), values.float().cpu().numpy())
