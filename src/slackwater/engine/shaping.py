"""Logits as a request wants them changed: penalties, biases, and masks, all functions of its
tokens.

Each row is computed by itself, so that batch mates change nothing. Works on any device's tensors;
requests that ask for none of this never come here.
"""

from collections.abc import Sequence as ListLike

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slackwater.engine.scheduler import Scheduler
from slackwater.engine.sequence import Sequence
from slackwater.engine.slots import SlotTable
from slackwater.model.sampling import Sampling

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
        """Mask all guided rows at once: the bits travel packed, and are unpacked where the logits
        are.
        """
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
    """Repetition scales the logits of every token seen; presence and frequency lower generated
    ones'.
    """
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
