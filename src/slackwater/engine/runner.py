"""Run a step plan: rows to logits, logits to sampled tokens and to prompt scores.

Penalties, biases and masks depend only on a request's own tokens and are applied row by row, so
that the other requests of a batch change nothing.
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


class LogitShaper:
    """Applies penalties, biases, grammar masks and min-p to rows of logits."""

    def __init__(self, slots: SlotTable, scheduler: Scheduler) -> None:
        self._slots, self._scheduler = slots, scheduler

    @torch.inference_mode()
    def shape(self, slots: NDArray[np.int64], logits: Tensor) -> Tensor:
        """A new `[len(slots), vocab]` float32 tensor, `-inf` where a token must not be sampled."""
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
        """Mask all guided rows at once: packed bits are copied and unpacked on the device."""
        guided = [(i, s.guide) for i, s in enumerate(sequences) if s.guide is not None]
        if not guided:
            return
        vocab = rows.shape[1]
        bits = np.zeros((len(guided), -(-vocab // 32)), np.int32)
        for line, (_, guide) in zip(bits, guided, strict=True):
            guide.allow(line)
        words = torch.from_numpy(bits).to(rows.device)
        shifts = torch.arange(32, device=rows.device, dtype=torch.int32)
        allowed = (words[:, :, None] >> shifts).bitwise_and_(1).reshape(len(guided), -1)[:, :vocab]
        indices = torch.tensor([i for i, _ in guided], device=rows.device)
        rows[indices] = rows[indices].masked_fill_(allowed == 0, _NEVER)


def _ends_of_bad_words(words: ListLike[ListLike[int]], generated: NDArray[np.int32]) -> list[int]:
    """The tokens that would now complete a bad word."""
    longest = max((len(word) for word in words), default=1) - 1
    last = generated[max(len(generated) - longest, 0) :].tolist()
    return [word[-1] for word in words if last[len(last) + 1 - len(word) :] == [*word[:-1]]]


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
    """New tokens by slot; `top` holds the likeliest tokens of the slots that requested them."""

    slots: NDArray[np.int64]
    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    top: dict[int, TopTokens]


NOTHING = SampledTokens(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32), {})


class Runner:
    """Runs a plan on the executor, one model after the other."""

    def __init__(
        self, slots: SlotTable, scheduler: Scheduler, executor: Executor, *, steps_ahead: bool
    ) -> None:
        self._slots, self._scheduler, self._executor = slots, scheduler, executor
        self._steps_ahead = steps_ahead
        self._shaper = LogitShaper(slots, scheduler)

    def run(self, plan: StepPlan) -> SampledTokens:
        """Compute the plan's tokens, score prompts, and sample the slots that are due a token."""
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
        """Compile and run everything once, on the scratch block: no request waits for it later."""
        self.warm_decode(net, (1,), (1,))
        tables, zeros = np.zeros_like(self._slots.tables[:1]), np.zeros(2, np.int64)
        batch = RowBatch(zeros, np.arange(2), zeros, np.array([1]), (), decode_only=False)
        self._executor.sample(self._executor.logits(net, batch, tables), _plain_sampling(1))

    def warm_decode(self, net: CausalLM, rows: ListLike[int], contexts: ListLike[int]) -> None:
        """Run decode steps of these sizes over these contexts, so that the device captures them."""
        tables = np.zeros_like(self._slots.tables[:1])
        longest = tables.shape[1] * self._slots.block_tokens
        for count in rows:
            zeros = np.zeros(count, np.int64)
            for context in contexts:
                positions = np.full(count, min(context, longest) - 1)
                batch = RowBatch(zeros, positions, zeros, np.arange(count), (), decode_only=True)
                self._executor.decode(net, batch, tables, _plain_sampling(count))

    def _run_group(self, plan: StepPlan, group: WeightGroup) -> SampledTokens:
        slots, counts = plan.slots[group.start : group.stop], plan.counts[group.start : group.stop]
        batch, ends, due = self._rows(slots, counts, group)
        if batch.decode_only:  # nothing of a prompt is left to score
            columns, tables = self._columns(slots), self._slots.tables
            ahead = self._next_uniforms(plan, len(slots), columns)
            logits, tokens, logprobs = self._executor.decode(
                group.net, batch, tables, columns, ahead
            )
            return self._finish_sampling(slots, logits, columns, tokens, logprobs)
        logits = self._executor.logits(group.net, batch, self._slots.tables)
        scored = np.nonzero(self._slots.scored[slots])[0]
        if len(scored):
            self._score(slots, counts, ends, scored, batch, logits)
            logits = logits[torch.from_numpy(np.searchsorted(batch.logit_rows, ends[due]))]
        if not len(due):
            return NOTHING
        slots = slots[due]
        columns = self._columns(slots)
        tokens, logprobs = self._executor.sample(logits, columns)
        return self._finish_sampling(slots, logits, columns, tokens, logprobs)

    def _next_uniforms(
        self, plan: StepPlan, rows: int, columns: SamplingColumns
    ) -> NDArray[np.float32] | None:
        """The next step's uniform numbers, if it can start before this step's tokens are read."""
        table, slots = self._slots, plan.slots
        if not self._steps_ahead or rows != self._scheduler.running or self._scheduler.waiting:
            return None
        cut = (columns.top_k > 0) | (columns.top_p < 1)
        if cut.any() or table.shaped[slots].any() or table.top_tokens[slots].any():
            return None
        goes_on = table.length[slots] + 1 < table.limit[slots]
        if not goes_on.any() or not self._scheduler.hold_next_blocks(plan):
            return None
        return uniforms(table.key[slots], table.length[slots] + 1)

    def _rows(
        self, slots: NDArray[np.int64], counts: NDArray[np.int64], group: WeightGroup
    ) -> tuple[RowBatch, NDArray[np.int64], NDArray[np.int64]]:
        """The rows; the index of each slot's last row; the slots that are due a new token."""
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

    def _columns(self, slots: NDArray[np.int64]) -> SamplingColumns:
        table = self._slots
        return SamplingColumns(
            table.temperature[slots],
            table.top_p[slots],
            table.top_k[slots],
            uniforms(table.key[slots], table.length[slots]),
        )

    def _finish_sampling(
        self,
        slots: NDArray[np.int64],
        logits: Tensor,
        columns: SamplingColumns,
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
    ) -> SampledTokens:
        """Sample the rows with shaped logits again, and add the requested likeliest tokens."""
        shaped = np.nonzero(self._slots.shaped[slots])[0]
        if len(shaped):
            tokens, logprobs = tokens.copy(), logprobs.copy()
            self._resample_shaped(slots, logits, columns, shaped, tokens, logprobs)
        return SampledTokens(slots, tokens, logprobs, self._top(slots, logits))

    def _top(self, slots: NDArray[np.int64], logits: Tensor) -> dict[int, TopTokens]:
        table, top = self._slots, {}
        for row in np.nonzero(table.top_tokens[slots])[0].tolist():
            slot = int(slots[row])
            temperature = float(table.temperature[slot]) or 1.0
            k = int(table.top_tokens[slot])
            top[slot] = top_tokens(torch.log_softmax(logits[row : row + 1] / temperature, -1), k)
        return top

    def _resample_shaped(
        self,
        slots: NDArray[np.int64],
        logits: Tensor,
        columns: SamplingColumns,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
    ) -> None:
        """Sample these rows from shaped logits; the log-probs stay those of the plain logits."""
        plain = logits[torch.from_numpy(rows).to(logits.device)]
        shaped = self._shaper.shape(slots[rows], plain)
        chosen, _ = self._executor.sample(shaped, columns.take(rows))
        for place, row in enumerate(rows.tolist()):
            token = int(chosen[place])
            if shaped[place, token] == _NEVER:  # by rounding, once in millions of draws
                token = int(shaped[place].argmax())
            temperature = float(columns.temperature[row]) or 1.0
            own = torch.log_softmax(plain[place : place + 1].float() / temperature, -1)
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
        """Score the prompt tokens that these rows predict: row p predicts position p + 1."""
        for place in scored.tolist():
            slot, stop = int(slots[place]), int(ends[place]) + 1
            sequence = self._scheduler.sequence(slot)
            first = int(self._slots.computed[slot])
            count = min(int(counts[place]), len(sequence.request.prompt) - 1 - first)
            if sequence.scoring is None or count <= 0:
                continue
            start = int(np.searchsorted(batch.logit_rows, stop - int(counts[place])))
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
        if scoring.target_ids and (scoring.target_ids[place] >= 0).any():
            ids = np.maximum(scoring.target_ids[place], 0)
            values = logprobs[row, torch.from_numpy(ids).to(logprobs.device)].cpu().numpy()
            scoring.targets[place][:] = np.where(scoring.target_ids[place] >= 0, values, 0.0)
    if scoring.alternatives is not None:
        found = draw_alternatives(logits.float(), logprobs, scoring, position)
        scoring.alternatives.tokens[position - 1 : stop - 1] = found.tokens
        scoring.alternatives.logprobs[position - 1 : stop - 1] = found.logprobs


def draw_alternatives(
    logits: Tensor, logprobs: Tensor, scoring: PromptScoring, position: int
) -> TopTokens:
    """Independent samples for each row, from a random stream separate from the answer's."""
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


def _plain_sampling(rows: int) -> SamplingColumns:
    ones, halves = np.ones(rows, np.float32), np.full(rows, 0.5, np.float32)
    return SamplingColumns(ones, ones, np.zeros(rows, np.int64), halves)
