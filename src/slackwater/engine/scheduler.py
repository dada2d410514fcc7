"""Which rows run in the next step: decoding first, then prompts in chunks, by arrival; owners get
equal shares (`owner_shares.py`).

When the cache is full the youngest request gives its blocks up and starts over later from its
tokens; nothing of it is lost, and batch-invariant arithmetic brings back the same numbers.
"""

from collections import deque
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.engine.block_pool import BlockPool, Digest
from slackwater.engine.owner_shares import OwnerShares, even_shares
from slackwater.engine.sequence import Sequence
from slackwater.engine.slots import SlotTable
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.lora import LoraAdapter

# that rows have in a row where others are held back: choosing them anew would lengthen every step
TURN_STEPS = 8
_LOOK_AHEAD = 64  # waiting requests looked at in one step when the first must wait


@dataclass(frozen=True, slots=True)
class StepPlan:
    """For each running slot, in order of weights: how many of its tokens to compute."""

    slots: NDArray[np.int64]
    counts: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A plan's entries `[start, stop)` share one model; `spans` are the adapters among them."""

    net: CausalLM
    start: int
    stop: int
    spans: tuple[tuple[int, int, LoraAdapter], ...]


class PromptLoad(NamedTuple):
    """A prompt that is not computed to its end: `tokens` are left after `computed` ones."""

    request_id: int
    tokens: int
    computed: int


class EngineLoad(NamedTuple):
    """Prompts in the order of their service; how many requests decode, and over how many tokens."""

    prompts: list[PromptLoad]
    decoding: int
    context: int


class Scheduler:
    """Waiting and running requests, their slots and their blocks."""

    def __init__(self, slots: SlotTable, blocks: BlockPool, max_step_tokens: int) -> None:
        self.slots, self.blocks = slots, blocks
        self._max_step_tokens = max_step_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._in_flight: dict[Digest, int] = {}
        self._order: NDArray[np.int64] | None = None
        self._order_groups: tuple[WeightGroup, ...] | None = None
        self._at_turn: StepPlan | None = None
        self._turn_groups: tuple[WeightGroup, ...] | None = None
        self._turn_steps = 0
        self.preemptions = 0
        self._owners = OwnerShares(slots.capacity)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def sequence(self, slot: int) -> Sequence:
        return self._running[slot]

    def runs(self, slot: int) -> bool:
        return slot in self._running

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def sequences(self) -> list[Sequence]:
        return [*self._running.values(), *self._waiting]

    def load(self) -> "EngineLoad":
        """What the next steps have to do."""
        order, table = self._by_weights(), self.slots
        length = table.length[order]
        pending = length - table.computed[order]
        decodes = pending <= 1
        prompts = [
            PromptLoad(sequence.request.request_id, int(left), int(known) - int(left))
            for sequence, left, known in sorted(
                (
                    (self._running[int(slot)], left, known)
                    for slot, left, known in zip(
                        order[~decodes], pending[~decodes], length[~decodes], strict=True
                    )
                ),
                key=lambda row: row[0].order,
            )
        ]
        prompts += [
            PromptLoad(sequence.request.request_id, sequence.known_tokens, 0)
            for sequence in self._waiting
        ]
        return EngineLoad(prompts, int(decodes.sum()), int(length[decodes].sum()))

    def youngest(self) -> Sequence | None:
        """The request that came last, waiting or running."""
        return max(self.sequences(), key=lambda sequence: sequence.order, default=None)

    def remove(self, sequence: Sequence) -> None:
        """Forget a request, waiting or running; its named blocks stay findable."""
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._leave(sequence)

    def plan(self, prompt_tokens: int | None = None, now_s: float = 0.0) -> StepPlan | None:
        """Rows for the next step, blocks held for all of them; None when there is nothing to do.

        `prompt_tokens` bounds how many tokens of prompts are among them. `now_s` tells which owners
        are about.
        """
        self._admit()
        while self._running:
            plan = self._rows_at_turn(now_s) or self._new_plan(prompt_tokens)
            if plan is None or self._hold_blocks(plan.slots, plan.counts) is None:
                return plan
            self._preempt_youngest()
        return None

    def _rows_at_turn(self, now_s: float) -> StepPlan | None:
        """The rows of the last step again, if others are held back for them and their turn is not
        over.
        """
        self._turn_steps -= 1
        if not self._owners.several(now_s) or self._order is None or self._turn_steps <= 0:
            self._at_turn = None
        return self._at_turn

    def _new_plan(self, prompt_tokens: int | None) -> StepPlan | None:
        order, table = self._by_weights(), self.slots
        pending = table.length[order] - table.computed[order]
        counts = np.minimum(pending, 1)
        self._give_chunks(order, pending, counts, prompt_tokens)
        held_back = self._owners.shared and self._owners.share(order, counts)
        chosen = counts > 0
        if chosen.all():
            return StepPlan(order, counts)
        if not chosen.any():
            return None
        plan = StepPlan(order[chosen], counts[chosen])
        if held_back and int(pending.max()) == 1:
            self._at_turn, self._turn_groups = plan, None
            self._turn_steps = TURN_STEPS
        return plan

    def hold_ahead(self, plan: StepPlan) -> bool:
        """Hold a block for every row's token after the planned one; whether each got one."""
        table = self.slots
        after = table.computed[plan.slots] + plan.counts + 1
        if int(after.max()) > table.tables.shape[1] * table.block_tokens:
            return False
        return self._hold_blocks(plan.slots, plan.counts + 1) is None

    def groups(self, plan: StepPlan) -> tuple[WeightGroup, ...]:
        """The plan cut by model and adapter."""
        if plan is self._at_turn:
            if self._turn_groups is None:
                self._turn_groups = self._cut(plan.slots)
            return self._turn_groups
        if plan.slots is not self._order:
            return self._cut(plan.slots)
        if self._order_groups is None:
            self._order_groups = self._cut(plan.slots)
        return self._order_groups

    def took(self, plan: StepPlan, seconds: float) -> None:
        """How long the step was under way."""
        rows = len(plan.slots)
        first = plan is self._at_turn and self._turn_steps == TURN_STEPS
        if int(plan.counts.sum()) == rows and not first:  # others cost something else
            self._owners.computed(rows, seconds)
        if self._owners.shared:
            self._owners.served(plan.slots)

    def computed(self, plan: StepPlan) -> None:
        """The planned tokens are in the cache: count them, and name the blocks they filled."""
        table, size = self.slots, self.slots.block_tokens
        before = table.computed[plan.slots]
        after = before + plan.counts
        table.computed[plan.slots] = after
        filled = after // size > before // size
        spans = zip(plan.slots[filled], before[filled] // size, after[filled] // size, strict=True)
        for slot, first, stop in ((int(a), int(b), int(c)) for a, b, c in spans):
            sequence = self._running[slot]
            sequence.extend_names(table.tokens[slot, : stop * size], size)
            for block in range(first, stop):
                name = sequence.names[block + 1]
                self.blocks.name(int(table.tables[slot, block]), name)
                if self._in_flight.get(name) == slot:
                    del self._in_flight[name]

    def check_integrity(self) -> None:
        """Slots, sequences and blocks agree; blocks in use are exactly those in the tables."""
        table = self.slots
        assert len(self._running) + table.free == table.capacity
        used: set[int] = set()
        for slot, sequence in self._running.items():
            assert sequence.slot == slot
            assert table.computed[slot] < table.length[slot] or table.computed[slot] == 0
            count = int(table.num_blocks[slot])
            assert count * table.block_tokens >= table.computed[slot]
            used.update(table.tables[slot, :count].tolist())
        assert len(used) == self.blocks.blocks_in_use
        assert all(sequence.slot is None for sequence in self._waiting)
        self.blocks.check_integrity()

    def _by_weights(self) -> NDArray[np.int64]:
        """Running slots, those of one set of weights together, adapters together within it."""
        if self._order is None:
            self._order_groups = None
            keys = {
                slot: (id(sequence.version.net), id(sequence.version.adapter), sequence.order)
                for slot, sequence in self._running.items()
            }
            self._order = np.array(sorted(self._running, key=keys.__getitem__), np.int64)
        return self._order

    def _cut(self, slots: NDArray[np.int64]) -> tuple[WeightGroup, ...]:
        versions = [self._running[slot].version for slot in slots.tolist()]
        groups, start = [], 0
        for _, members in groupby(versions, key=lambda version: id(version.net)):
            inside, at = list(members), 0
            spans: list[tuple[int, int, LoraAdapter]] = []
            for _, same in groupby(inside, key=lambda version: id(version.adapter)):
                count, adapter = len(list(same)), inside[at].adapter
                if adapter is not None:
                    spans.append((start + at, start + at + count, adapter))
                at += count
            groups.append(WeightGroup(inside[0].net, start, start + at, tuple(spans)))
            start += at
        return tuple(groups)

    def _give_chunks(
        self,
        order: NDArray[np.int64],
        pending: NDArray[np.int64],
        counts: NDArray[np.int64],
        prompt_tokens: int | None,
    ) -> None:
        """Share the step's tokens among the owners of prompts, oldest first."""
        prompts = np.nonzero(pending > 1)[0]
        if not len(prompts):
            return
        counts[prompts] = 0
        left = max(self._max_step_tokens - int(counts.sum()), 1)
        if prompt_tokens is not None:
            left = min(left, prompt_tokens)
        sequences = [self._running[int(order[place])] for place in prompts]
        wants: dict[str, int] = {}
        for sequence, place in zip(sequences, prompts.tolist(), strict=True):
            owner = sequence.request.owner
            wants[owner] = wants.get(owner, 0) + int(pending[place])
        lefts = even_shares(wants, left)
        for nth in np.argsort([sequence.order for sequence in sequences]).tolist():
            place, owner = int(prompts[nth]), sequences[nth].request.owner
            counts[place] = min(lefts[owner], int(pending[place]))
            lefts[owner] -= int(counts[place])

    def _hold_blocks(self, order: NDArray[np.int64], counts: NDArray[np.int64]) -> int | None:
        """Make room for the counted tokens; the slot that found none, or None."""
        table = self.slots
        wanted = -(-(table.computed[order] + counts) // table.block_tokens)
        for place in np.nonzero(wanted > table.num_blocks[order])[0].tolist():
            slot = int(order[place])
            if not self._extend(slot, int(wanted[place])):
                return slot
        return None

    def _extend(self, slot: int, wanted: int) -> bool:
        table = self.slots
        while table.num_blocks[slot] < wanted:
            block = self.blocks.take()
            if block is None:
                return False
            table.tables[slot, table.num_blocks[slot]] = block
            table.num_blocks[slot] += 1
        return True

    def _admit(self) -> None:
        promised = 0
        skipped: list[Sequence] = []
        while self._waiting and self.slots.free and len(skipped) < _LOOK_AHEAD:
            sequence = self._waiting[0]
            fresh = self._fresh_names(sequence)
            if any(name in self._in_flight for name in fresh):
                skipped.append(self._waiting.popleft())
                continue
            needed = sequence.known_tokens // self.slots.block_tokens + 1
            if self._running and promised + needed > self.blocks.available():
                break
            promised += needed
            self._enter(self._waiting.popleft(), fresh)
        self._waiting.extendleft(reversed(skipped))

    def _shares(self, sequence: Sequence) -> bool:
        """Whether it takes blocks from the cache; a scored prompt computes every one of them."""
        return self.blocks.keeps_prefixes and sequence.scoring is None

    def _fresh_names(self, sequence: Sequence) -> ListLike[Digest]:
        """Names of its blocks that it would share but are not in the cache."""
        if not self._shares(sequence):
            return []
        tokens = sequence.known()
        sequence.extend_names(tokens, self.slots.block_tokens)
        usable = (len(tokens) - 1) // self.slots.block_tokens
        names = sequence.names[1 : usable + 1]
        known = 0
        while known < len(names) and self.blocks.knows(names[known]):
            known += 1
        return names[known:]

    def _found_blocks(self, sequence: Sequence, fresh: ListLike[Digest]) -> int:
        usable = (sequence.known_tokens - 1) // self.slots.block_tokens
        return usable - len(fresh) if self._shares(sequence) else 0

    def uncached_tokens(self, sequence: Sequence) -> int:
        """What of a waiting request would have to be computed if it ran now."""
        found = self._found_blocks(sequence, self._fresh_names(sequence))
        return sequence.known_tokens - found * self.slots.block_tokens

    def _enter(self, sequence: Sequence, fresh: ListLike[Digest]) -> None:
        scored = sequence.scoring is not None
        slot = self.slots.claim(sequence.request, sequence.stop_ids, scored=scored)
        sequence.slot = slot
        self._running[slot] = sequence
        self._owners.entered(slot, sequence.request.owner)
        self._order = None
        found = self._found_blocks(sequence, fresh)
        for name in islice(sequence.names, 1, found + 1):
            block = self.blocks.find(name)
            assert block is not None, "nothing is evicted between looking and taking"
            self.slots.tables[slot, self.slots.num_blocks[slot]] = block
            self.slots.num_blocks[slot] += 1
        self.slots.computed[slot] = found * self.slots.block_tokens
        prompt = len(sequence.request.prompt)
        sequence.cached_tokens = max(
            sequence.cached_tokens, min(prompt, found * self.slots.block_tokens)
        )
        for name in fresh:
            self._in_flight[name] = slot

    def _preempt_youngest(self) -> None:
        youngest = max(self._running.values(), key=lambda sequence: sequence.order)
        slot = youngest.slot
        youngest.keep(self.slots.tokens[slot, : self.slots.length[slot]])
        self._leave(youngest)
        places = (i for i, other in enumerate(self._waiting) if other.order > youngest.order)
        self._waiting.insert(next(places, len(self._waiting)), youngest)
        self.preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        slot = sequence.slot
        assert slot is not None
        count = int(self.slots.num_blocks[slot])
        # Last block first: the start of a prefix is the part worth keeping longest.
        for block in reversed(self.slots.tables[slot, :count].tolist()):
            self.blocks.drop(block)
        self.slots.num_blocks[slot] = 0
        self.slots.release(slot)
        self._in_flight = {n: owner for n, owner in self._in_flight.items() if owner != slot}
        del self._running[slot]
        self._owners.left(sequence.request.owner)
        sequence.slot = None
        self._order = None
