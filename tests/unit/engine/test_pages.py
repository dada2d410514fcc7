"""Pages and blocks: memory that moves between models, and prefixes that are found again."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slackwater.engine.block_pool import BlockPool, chain, root
from slackwater.engine.pages import HostPagePool, PageArena, host_view

PAGE = 4096


def test_two_arenas_share_the_pages_of_one_pool_and_contents_stay_apart() -> None:
    pool = HostPagePool(4 * PAGE, PAGE)
    first, second = PageArena(pool, 4 * PAGE), PageArena(pool, 4 * PAGE)
    assert first.hold(0, 3 * PAGE)
    assert second.hold(PAGE, 2 * PAGE)
    assert not second.hold(2 * PAGE, 3 * PAGE), "four pages in all"
    host_view(first)[: 3 * PAGE // 4] = 7
    host_view(second)[PAGE // 4 : 2 * PAGE // 4] = 9
    first.release(2 * PAGE, 3 * PAGE)
    assert not second.hold(2 * PAGE, 3 * PAGE), "an idle page stays until it is reclaimed"
    assert first.reclaim(5) == 1
    assert second.hold(2 * PAGE, 3 * PAGE)
    host_view(second)[2 * PAGE // 4 : 3 * PAGE // 4] = 11
    assert (host_view(first)[: 2 * PAGE // 4] == 7).all()
    assert (host_view(second)[PAGE // 4 : 2 * PAGE // 4] == 9).all()
    first.close()
    second.close()
    assert len(pool._free) == 4
    pool.trim()
    pool.close()


def test_a_span_that_finds_too_few_pages_takes_none() -> None:
    pool = HostPagePool(2 * PAGE, PAGE)
    arena = PageArena(pool, 4 * PAGE)
    assert not arena.hold(0, 3 * PAGE)
    assert len(pool._free) == 2
    assert arena.hold(0, 2 * PAGE)


def test_pages_that_are_set_aside_are_nobodys_until_they_are_back() -> None:
    pool = HostPagePool(4 * PAGE, PAGE)
    arena = PageArena(pool, 4 * PAGE)
    assert arena.hold(0, 2 * PAGE)
    assert not pool.set_aside(3), "two are free"
    assert pool.set_aside(1)
    assert not arena.hold(2 * PAGE, 4 * PAGE)
    assert arena.hold(2 * PAGE, 3 * PAGE)
    assert pool.set_aside(0)
    assert arena.hold(3 * PAGE, 4 * PAGE)
    host_view(arena)[:] = 5
    assert (host_view(arena) == 5).all()


def test_spans_that_share_a_page_keep_it_until_both_are_gone() -> None:
    pool = HostPagePool(4 * PAGE, PAGE)
    arena = PageArena(pool, 4 * PAGE)
    assert arena.hold(0, PAGE + 100)
    assert arena.hold(PAGE + 100, 2 * PAGE)
    arena.release(0, PAGE + 100)
    assert arena.reclaim(9) == 1
    arena.release(PAGE + 100, 2 * PAGE)
    assert arena.reclaim(9) == 1
    assert arena.mapped_pages == 0


def blocks(count: int, block_bytes: int = 1000) -> BlockPool:
    """`count` blocks to give out, besides the scratch block; they straddle pages."""
    pool = HostPagePool(-(-(count + 1) * block_bytes // PAGE) * PAGE, PAGE)
    size = (count + 1) * block_bytes
    arena = PageArena(pool, size)
    found = BlockPool(arena, block_bytes, keep_prefixes=True)
    found.num_blocks = count + 1
    return found


def test_memory_follows_what_is_in_use_down_again_after_a_burst() -> None:
    arena = PageArena(HostPagePool(101 * PAGE, PAGE), 401 * 1000)
    pool = BlockPool(arena, 1000, keep_prefixes=True)
    burst = [pool.take() for _ in range(400)]
    for block in burst[::-1][::2] + burst[::2]:
        assert block is not None
        pool.drop(block)
    held: list[int] = []
    for _ in range(20):  # few are in use at a time, each for a while
        pool.evict_unused()
        held += [block for block in (pool.take() for _ in range(4)) if block is not None]
        for block in held[:-20]:
            pool.drop(block)
        held = held[-20:]
    arena.release_idle()
    assert arena.mapped_pages <= 20 * 1000 // PAGE + 3


def test_the_prefix_unused_longest_goes_first() -> None:
    pool = blocks(3)
    names = [chain(root("v", 0), np.array([i], np.int32)) for i in range(3)]
    taken = [pool.take() for _ in range(3)]
    for block, name in zip(taken, names, strict=True):
        assert block is not None
        pool.name(block, name)
    assert pool.take() is None
    for place in (1, 0, 2):
        pool.drop(taken[place])  # type: ignore[arg-type]
    assert pool.find(names[1]) == taken[1], "used again: now the youngest"
    pool.drop(taken[1])  # type: ignore[arg-type]
    assert pool.take() == taken[0]
    assert pool.find(names[0]) is None
    assert pool.find(names[2]) == taken[2]
    pool.check_integrity()


def test_a_name_depends_on_version_generation_and_every_token_before() -> None:
    tokens = np.arange(16, dtype=np.int32)
    names = {
        chain(root("a", 0), tokens),
        chain(root("b", 0), tokens),
        chain(root("a", 1), tokens),
        chain(root("a", 0), tokens[::-1].copy()),
        chain(chain(root("a", 0), tokens), tokens),
    }
    assert len(names) == 5


class Blocks(RuleBasedStateMachine):
    """Random use: counts stay right, a block in use is never given twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = blocks(12, block_bytes=1500)
        self.held: list[int] = []
        self.named = 0

    @rule()
    def take(self) -> None:
        block = self.pool.take()
        if block is None:
            assert len(set(self.held)) == 12
        else:
            assert block not in self.held
            assert block != 0
            self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.drop(self.held.pop(place))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.name(block, str(self.named % 6).encode())
        self.named += 1

    @rule(number=st.integers(0, 5))
    def find(self, number: int) -> None:
        block = self.pool.find(str(number).encode())
        if block is not None:
            self.held.append(block)

    @rule()
    def forget(self) -> None:
        self.pool.evict_unused()

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check_integrity()
        assert self.pool.blocks_in_use == len(set(self.held))


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_letting_go_twice_is_our_bug_and_is_said_so() -> None:
    pool = blocks(2)
    block = pool.take()
    assert block is not None
    pool.drop(block)
    with pytest.raises(AssertionError, match="twice"):
        pool.drop(block)
