"""Which rows run in the next step: decoding first, then prompts in chunks, by arrival; owners get
equal shares (`owner_shares.py`).

When the cache is full the youngest request is preempted: it frees its blocks and is recomputed from
its tokens later. No token is lost, and batch-invariant arithmetic gives the same numbers again.
"""

from collections import Counter, deque
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

# Steps for which the same rows run while others are throttled: choosing rows costs time.
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
    """A prompt that is not fully computed: `tokens` are left after `computed` ones."""

    request_id: int
    tokens: int
    computed: int


class EngineLoad(NamedTuple):
    """Prompts in scheduling order; how many requests decode, and the sum of their contexts."""

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
        self._being_computed: dict[Digest, int] = {}
        self._order: NDArray[np.int64] | None = None
        self._order_groups: tuple[WeightGroup, ...] | None = None
        self._turn_plan: StepPlan | None = None
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

    def is_running(self, slot: int) -> bool:
        return slot in self._running

    def add(self, sequence: Sequence) -> None:
        """Queue a request. While others are throttled, a further request of an owner waits for the
        turn's end: to choose rows again for each of them would lengthen the steps of all.
        """
        self._waiting.append(sequence)
        if not self._owners.num_running(sequence.request.owner):
            self._turn_plan = None

    def sequences(self) -> list[Sequence]:
        return [*self._running.values(), *self._waiting]

    def load(self) -> "EngineLoad":
        order, table = self._order_by_weights(), self.slots
        length = table.length[order]
        pending = length - table.computed[order]
        decodes = pending <= 1
        slots = sorted(order[~decodes].tolist(), key=lambda slot: self._running[slot].order)
        prompts = []
        for slot in slots:
            computed = int(table.computed[slot])
            left = int(table.length[slot]) - computed
            prompts.append(PromptLoad(self._running[slot].request.request_id, left, computed))
        prompts += [PromptLoad(s.request.request_id, s.num_tokens, 0) for s in self._waiting]
        return EngineLoad(prompts, int(decodes.sum()), int(length[decodes].sum()))

    def youngest(self) -> Sequence | None:
        """The request that arrived last, waiting or running."""
        return max(self.sequences(), key=lambda sequence: sequence.order, default=None)

    def remove(self, sequence: Sequence) -> None:
        """Remove a request, waiting or running; its named blocks stay cached."""
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._stop_running(sequence)

    def plan(
        self, prompt_tokens: int | None = None, now_s: float = 0.0, *, decode: bool = True
    ) -> StepPlan | None:
        """The next step's rows, with blocks allocated for all of them; None if nothing can run.

        `prompt_tokens` bounds the prompt tokens among them; without `decode` other rows wait if a
        prompt can run. `now_s` determines the active owners.
        """
        self._turn_steps -= 1
        if self._turn_steps <= 0:
            self._turn_plan = None
        if self._turn_plan is None:
            self._admit()
        if not self._owners.refresh_active_owners(now_s):
            self._turn_plan = None
        while self._running:
            plan = self._turn_plan or self._new_plan(prompt_tokens, decode=decode)
            if plan is None or self._hold_blocks(plan.slots, plan.counts) is None:
                return plan
            self._preempt_youngest()
        return None

    def _new_plan(self, prompt_tokens: int | None, *, decode: bool) -> StepPlan | None:
        order, table = self._order_by_weights(), self.slots
        pending = table.length[order] - table.computed[order]
        counts = np.minimum(pending, 1)
        delayed = self._find_delayed_prompts(order, pending)
        counts[delayed] = 0
        pending[delayed] = 0
        if not decode and (pending > 1).any():
            counts[pending <= 1] = 0
        self._share_prompt_tokens(order, pending, counts, prompt_tokens)
        throttled = self._owners.has_several_owners and self._owners.share(
            order, counts, frozenset(order[delayed].tolist())
        )
        chosen = counts > 0
        if chosen.all():
            return StepPlan(order, counts)
        if not chosen.any():
            return None
        plan = StepPlan(order[chosen], counts[chosen])
        if (throttled or len(delayed)) and int(pending.max()) == 1:
            self._turn_plan, self._turn_groups = plan, None
            self._turn_steps = TURN_STEPS
        return plan

    def hold_next_blocks(self, plan: StepPlan) -> bool:
        """Allocate a block for the token after each row's planned one; whether each got one."""
        table = self.slots
        after = table.computed[plan.slots] + plan.counts + 1
        if int(after.max()) > table.tables.shape[1] * table.block_tokens:
            return False
        return self._hold_blocks(plan.slots, plan.counts + 1) is None

    def groups(self, plan: StepPlan) -> tuple[WeightGroup, ...]:
        if plan is self._turn_plan:
            if self._turn_groups is None:
                self._turn_groups = self._group_by_weights(plan.slots)
            return self._turn_groups
        if plan.slots is not self._order:
            return self._group_by_weights(plan.slots)
        if self._order_groups is None:
            self._order_groups = self._group_by_weights(plan.slots)
        return self._order_groups

    def record_step_time(self, plan: StepPlan, seconds: float) -> None:
        """Let the owner shares learn from a pure decode step.

        A turn's first step also chooses rows, and prompt tokens cost something else: both are left
        out.
        """
        rows, owners = len(plan.slots), self._owners
        decodes_only = int(plan.counts.sum()) == rows
        if owners.has_several_owners:
            prompts = {} if decodes_only else self._prompt_tokens_by_owner(plan)
            owners.charge_prompts(prompts, seconds)
            owners.mark_served(plan.slots)
        first = plan is self._turn_plan and self._turn_steps == TURN_STEPS
        if decodes_only and not first:
            owners.step_time.add(rows, seconds)

    def mark_computed(self, plan: StepPlan) -> None:
        """The planned tokens are in the cache: count them, and name the blocks that they filled."""
        table, size = self.slots, self.slots.block_tokens
        before = table.computed[plan.slots]
        after = before + plan.counts
        table.computed[plan.slots] = after
        filled = after // size > before // size
        spans = zip(plan.slots[filled], before[filled] // size, after[filled] // size, strict=True)
        for slot, first, stop in ((int(a), int(b), int(c)) for a, b, c in spans):
            sequence = self._running[slot]
            sequence.extend_block_names(table.tokens[slot, : stop * size], size)
            for block in range(first, stop):
                name = sequence.block_names[block + 1]
                self.blocks.name(int(table.tables[slot, block]), name)
                if self._being_computed.get(name) == slot:
                    del self._being_computed[name]

    def check_integrity(self) -> None:
        """Slots, sequences and blocks agree; the blocks in use are exactly those in the tables."""
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

    def _order_by_weights(self) -> NDArray[np.int64]:
        """Running slots grouped by weights, and by adapter within them."""
        if self._order is None:
            self._order_groups = None
            keys = {
                slot: (id(sequence.version.net), id(sequence.version.adapter), sequence.order)
                for slot, sequence in self._running.items()
            }
            self._order = np.array(sorted(self._running, key=keys.__getitem__), np.int64)
        return self._order

    def _group_by_weights(self, slots: NDArray[np.int64]) -> tuple[WeightGroup, ...]:
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

    def _share_prompt_tokens(
        self,
        order: NDArray[np.int64],
        pending: NDArray[np.int64],
        counts: NDArray[np.int64],
        prompt_tokens: int | None,
    ) -> None:
        """Share the step's prompt tokens among their owners, oldest requests first."""
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

    def _find_delayed_prompts(
        self, order: NDArray[np.int64], pending: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Entries of prompts whose owners must let others decode first; none if nothing else
        would run.
        """
        prompts = np.flatnonzero(pending > 1)
        if not self._owners.has_several_owners or not len(prompts):
            return prompts[:0]
        owners = [self._running[int(slot)].request.owner for slot in order[prompts]]
        delayed = prompts[[self._owners.must_delay_prompts(owner) for owner in owners]]
        return delayed if len(delayed) < len(order) else delayed[:0]

    def _prompt_tokens_by_owner(self, plan: StepPlan) -> Counter[str]:
        tokens: Counter[str] = Counter()
        for entry in np.flatnonzero(plan.counts > 1).tolist():
            owner = self._running[int(plan.slots[entry])].request.owner
            tokens[owner] += int(plan.counts[entry])
        return tokens

    def _hold_blocks(self, order: NDArray[np.int64], counts: NDArray[np.int64]) -> int | None:
        """Allocate blocks for the counted tokens; the first slot that gets none, or None."""
        table = self.slots
        wanted = -(-(table.computed[order] + counts) // table.block_tokens)
        for place in np.nonzero(wanted > table.num_blocks[order])[0].tolist():
            slot = int(order[place])
            if not self._extend_table(slot, int(wanted[place])):
                return slot
        return None

    def _extend_table(self, slot: int, wanted: int) -> bool:
        table = self.slots
        while table.num_blocks[slot] < wanted:
            block = self.blocks.take()
            if block is None:
                return False
            table.tables[slot, table.num_blocks[slot]] = block
            table.num_blocks[slot] += 1
        return True

    def _admit(self) -> None:
        """Start waiting requests that fit.

        A request whose prefix another one is computing right now waits for those blocks; up to
        `_LOOK_AHEAD` requests behind it may overtake it.
        """
        reserved = 0
        skipped: list[Sequence] = []
        while self._waiting and self.slots.free and len(skipped) < _LOOK_AHEAD:
            sequence = self._waiting[0]
            fresh = self._fresh_names(sequence)
            if any(name in self._being_computed for name in fresh):
                skipped.append(self._waiting.popleft())
                continue
            needed = sequence.num_tokens // self.slots.block_tokens + 1
            if self._running and reserved + needed > self.blocks.available():
                break
            reserved += needed
            self._start_running(self._waiting.popleft(), fresh)
        self._waiting.extendleft(reversed(skipped))

    def _uses_prefix_cache(self, sequence: Sequence) -> bool:
        """Whether it reuses cached blocks; a scored prompt needs all its logits computed."""
        return self.blocks.keeps_prefixes and sequence.scoring is None

    def _fresh_names(self, sequence: Sequence) -> ListLike[Digest]:
        """Names of its shareable blocks that are not in the cache."""
        if not self._uses_prefix_cache(sequence):
            return []
        tokens = sequence.all_tokens()
        sequence.extend_block_names(tokens, self.slots.block_tokens)
        usable = (len(tokens) - 1) // self.slots.block_tokens
        names = sequence.block_names[1 : usable + 1]
        known = 0
        while known < len(names) and self.blocks.knows(names[known]):
            known += 1
        return names[known:]

    def _count_cached_blocks(self, sequence: Sequence, fresh: ListLike[Digest]) -> int:
        usable = (sequence.num_tokens - 1) // self.slots.block_tokens
        return usable - len(fresh) if self._uses_prefix_cache(sequence) else 0

    def count_uncached_tokens(self, sequence: Sequence) -> int:
        """How many tokens of a waiting request would be computed if it started now."""
        cached = self._count_cached_blocks(sequence, self._fresh_names(sequence))
        return sequence.num_tokens - cached * self.slots.block_tokens

    def _start_running(self, sequence: Sequence, fresh: ListLike[Digest]) -> None:
        scored = sequence.scoring is not None
        slot = self.slots.claim(sequence.request, sequence.stop_ids, scored=scored)
        sequence.slot = slot
        self._running[slot] = sequence
        self._owners.add_request(slot, sequence.request.owner)
        self._order = None
        found = self._count_cached_blocks(sequence, fresh)
        for name in islice(sequence.block_names, 1, found + 1):
            block = self.blocks.find(name)
            assert block is not None, "nothing is evicted between the lookup and this"
            self.slots.tables[slot, self.slots.num_blocks[slot]] = block
            self.slots.num_blocks[slot] += 1
        self.slots.computed[slot] = found * self.slots.block_tokens
        prompt = len(sequence.request.prompt)
        sequence.cached_tokens = max(
            sequence.cached_tokens, min(prompt, found * self.slots.block_tokens)
        )
        for name in fresh:
            self._being_computed[name] = slot

    def _preempt_youngest(self) -> None:
        youngest = max(self._running.values(), key=lambda sequence: sequence.order)
        slot = youngest.slot
        youngest.save_generated(self.slots.tokens[slot, : self.slots.length[slot]])
        self._stop_running(youngest)
        places = (i for i, other in enumerate(self._waiting) if other.order > youngest.order)
        self._waiting.insert(next(places, len(self._waiting)), youngest)
        self.preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        slot = sequence.slot
        assert slot is not None
        count = int(self.slots.num_blocks[slot])
        # Last block first: the start of a prefix is the part worth keeping longest.
        for block in reversed(self.slots.tables[slot, :count].tolist()):
            self.blocks.drop(block)
        self.slots.num_blocks[slot] = 0
        self.slots.release(slot)
        self._being_computed = {
            n: owner for n, owner in self._being_computed.items() if owner != slot
        }
        del self._running[slot]
        self._owners.remove_request(sequence.request.owner)
        sequence.slot = None
        self._order = self._turn_plan = None
