"""What holds an action's processes together: which cores they have, how much memory, how many they may be.

One port and three ways, chosen once at start: control groups of version 2, of version 1, or (where none can be
written to) core pinning and resource limits of the processes themselves.
"""

import os
import resource
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from slackwater.sandbox import process_tree
from slackwater.sandbox.launch import Child, Launch, start
from slackwater.sandbox.limits import Limits

TOKEN = "SLACKWATER_ENVIRONMENT"


class Fence(Protocol):
    """Round one action."""

    def rlimits(self, limits: Limits) -> Mapping[int, int]:
        """What its processes must be limited to besides."""
        ...

    def start(self, launch: Launch, limits: Limits) -> Child:
        """Start a process inside, with these cores and limits."""
        ...

    def kill_all(self) -> None:
        """End everybody inside."""
        ...

    def cpu_s(self) -> float:
        """Processor time used inside so far, where it is counted."""
        ...

    def memory_kills(self) -> int:
        """How often the kernel ended a process inside for want of memory, so far."""
        ...


class Fences(Protocol):
    """Makes fences in one way, and uses them again."""

    name: str
    pins_for_good: bool  # whether a process cannot take more cores than it was given

    def take(self, environment: str, user: int | None, cores: frozenset[int]) -> Fence:
        """For one action on these cores."""
        ...

    def give_back(self, fence: Fence) -> None:
        """Nobody is inside any more."""
        ...

    def others(self) -> set[int]:
        """Children of this process that are no actions."""
        ...

    def close(self) -> None:
        """Take down everything."""
        ...


class PinnedFence:
    """Core pinning and resource limits. Whoever is inside is known by user, by tree, or by a variable."""

    def __init__(self, environment: str, user: int | None, takers: Counter[str]) -> None:
        self.environment = environment
        self._user = user
        self._takers = takers
        self._first: int | None = None

    def rlimits(self, limits: Limits) -> Mapping[int, int]:
        others = 0 if self._user is not None else _processes_of_user(os.getuid())
        return {
            resource.RLIMIT_AS: limits.memory_bytes,
            resource.RLIMIT_NPROC: limits.processes + others,
        }

    def start(self, launch: Launch, limits: Limits) -> Child:
        child = start(launch)
        self._first = child.pid
        return child

    def kill_all(self) -> None:
        """Those of the user at once; else down the tree, and orphans, which come to this process."""
        inside = self._inside()
        if self._user is not None and inside and self._takers[self.environment] == 1:
            process_tree.kill_all_of_user(self._user)
        for pid in inside:
            process_tree.kill(pid)

    def cpu_s(self) -> float:
        return 0.0

    def _inside(self) -> list[int]:
        """An orphan without the variable is nobody's, so it goes too; not so while a neighbour runs in there."""
        found = [] if self._first is None else list(process_tree.below(self._first))
        if self._takers[self.environment] > 1:
            return found
        for pid in set(process_tree.children(os.getpid())) - process_tree.helpers:
            whose = process_tree.variables(pid)
            if pid != self._first and whose.get(TOKEN, self.environment) == self.environment:
                found += process_tree.below(pid)
        return found

    def memory_kills(self) -> int:
        return 0


class PinnedFences:
    """Where no control group can be written to."""

    name = "pinning"
    pins_for_good = False

    def __init__(self) -> None:
        self._takers: Counter[str] = Counter()

    def take(self, environment: str, user: int | None, cores: frozenset[int]) -> Fence:
        self._takers[environment] += 1
        return PinnedFence(environment, user, self._takers)

    def give_back(self, fence: Fence) -> None:
        assert isinstance(fence, PinnedFence)
        self._takers[fence.environment] -= 1

    def others(self) -> set[int]:
        return set()

    def close(self) -> None:
        """Nothing to take down."""


def _processes_of_user(user: int) -> int:
    """The limit counts threads of everything that the user runs, also elsewhere."""
    count = 0
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                try:
                    if entry.stat().st_uid == user:
                        count += len(list(Path(entry.path, "task").iterdir()))
                except OSError:
                    continue
    return count
