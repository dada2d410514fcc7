"""Blocks of the KV cache: reference counts, prefix names and eviction.

A block holds a fixed number of tokens (the executor's `block_tokens`) of all layers. A full block
is named by a digest of the weight version and all tokens up to its end, so equal prefixes share it.
A named block without users stays cached until memory is needed; the least recently used goes first.
"""

from collections import OrderedDict
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from slackwater.engine.pages import PageArena
from slackwater.model.errors import RefusedError

Digest = bytes
SCRATCH = 0  # block 0 is never allocated: padding rows of a batch write there


def chain(parent: Digest, tokens: NDArray[np.int32]) -> Digest:
    """The name of a block after `parent`; the first block's parent names the weight version."""
    return blake2b(tokens.tobytes(), key=parent, digest_size=16).digest()


def root(version: str, generation: int) -> Digest:
    """The parent of every first block under one state of one weight version."""
    return blake2b(f"{generation}:{version}".encode(), digest_size=16).digest()


class BlockPool:
    """Reference counts, names and reuse of the blocks of one arena."""

    def __init__(self, arena: PageArena, block_bytes: int, *, keep_prefixes: bool) -> None:
        self._arena = arena
        self._block_bytes = block_bytes
        self.keeps_prefixes = keep_prefixes
        self.num_blocks = arena.size_bytes // block_bytes
        self._users = [0] * self.num_blocks
        self._name_of: dict[int, Digest] = {}
        self._block_of: dict[Digest, int] = {}
        self._unused_named: OrderedDict[int, float] = OrderedDict()
        self.now_s = 0.0  # set by engines whose prefixes expire
        self._free: list[int] = []
        self._untouched = SCRATCH + 1
        self.blocks_in_use = 0
        if not arena.hold(0, block_bytes):
            raise RefusedError(
                "KV memory: the pool has no page left for another model; raise --kv-mb"
            )

    @property
    def named_blocks(self) -> int:
        return len(self._block_of)

    def take(self) -> int | None:
        """Allocate a block with one user and no name; None when every block is in use."""
        block = self._fresh()
        if block is None and self._unused_named:
            block, _ = self._unused_named.popitem(last=False)
            self._forget(block)
        if block is not None:
            self._users[block] = 1
            self.blocks_in_use += 1
        return block

    def find(self, name: Digest) -> int | None:
        """The block of that name, with one more user, or None."""
        block = self._block_of.get(name)
        if block is None:
            return None
        if self._users[block] == 0:
            del self._unused_named[block]
            self.blocks_in_use += 1
        self._users[block] += 1
        return block

    def knows(self, name: Digest) -> bool:
        return name in self._block_of

    def name(self, block: int, name: Digest) -> None:
        """Make a full block findable; of equal blocks the first keeps the name."""
        if self.keeps_prefixes and name not in self._block_of and block not in self._name_of:
            self._block_of[name] = block
            self._name_of[block] = name

    def drop(self, block: int) -> None:
        self._users[block] -= 1
        assert self._users[block] >= 0, "a block was dropped twice"
        if self._users[block] == 0:
            self.blocks_in_use -= 1
            if block in self._name_of:
                self._unused_named[block] = self.now_s
            else:
                self._let_go(block)

    @property
    def unused_named(self) -> int:
        return len(self._unused_named)

    def evict_unused(self, before_s: float = float("inf")) -> int:
        """Evict prefixes unused since `before_s`, so that their pages can be reclaimed."""
        evicted = 0
        while self._unused_named:
            block, since_s = next(iter(self._unused_named.items()))
            if since_s >= before_s:
                break
            del self._unused_named[block]
            self._forget(block)
            self._let_go(block)
            evicted += 1
        # The lowest blocks are allocated first, so that pages at the end become empty over time.
        self._free.sort(reverse=True)
        return evicted

    def available(self) -> int:
        """Blocks that `take` could allocate without a preemption, if the pool has pages."""
        free = len(self._free) + self.num_blocks - self._untouched
        return free + len(self._unused_named)

    def check_integrity(self) -> None:
        """Every block is free, untouched, in use, or cached without users."""
        used = [block for block, users in enumerate(self._users) if users > 0]
        assert len(used) == self.blocks_in_use
        free = set(self._free)
        assert len(free) == len(self._free)
        assert not free & set(used)
        assert not free & set(self._unused_named)
        assert all(self._users[block] == 0 for block in self._unused_named)
        assert {block: name for name, block in self._block_of.items()} == self._name_of
        touched = len(used) + len(free) + len(self._unused_named)
        assert touched == self._untouched - SCRATCH - 1

    def _fresh(self) -> int | None:
        if self._free:
            if self._hold(self._free[-1]):
                return self._free.pop()
            return None
        if self._untouched < self.num_blocks and self._hold(self._untouched):
            self._untouched += 1
            return self._untouched - 1
        return None

    def _hold(self, block: int) -> bool:
        start = block * self._block_bytes
        return self._arena.hold(start, start + self._block_bytes)

    def _let_go(self, block: int) -> None:
        start = block * self._block_bytes
        self._arena.release(start, start + self._block_bytes)
        self._free.append(block)

    def _forget(self, block: int) -> None:
        del self._block_of[self._name_of.pop(block)]
