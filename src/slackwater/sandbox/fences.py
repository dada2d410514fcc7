"""Fences confine an action's processes: cores, memory, number of processes.

Chosen once at start: control groups v2, v1, or (if neither is writable) pinning and rlimits.
"""

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from slackwater.sandbox import process_tree
from slackwater.sandbox.launch import Launch, LaunchedProcess, start
from slackwater.sandbox.limits import Limits
from slackwater.sandbox.reaper import end_below, start_below_reaper


class Fence(Protocol):
    """Round one action."""

    def rlimits(self, limits: Limits) -> Mapping[int, int]:
        """Additional rlimits of its processes."""
        ...

    def start(self, launch: Launch, limits: Limits) -> LaunchedProcess:
        """Start a process inside, with these cores and limits."""
        ...

    def kill_all(self) -> None:
        """Kill all processes inside."""
        ...

    def cpu_s(self) -> float:
        """CPU time used inside so far, if counted."""
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
        """Return an empty fence."""
        ...

    def others(self) -> set[int]:
        """Children of this process that are not actions."""
        ...

    def close(self) -> None:
        """Take down everything."""
        ...


class PinnedFence:
    """Pinning and rlimits. Members are known by user, pid namespace or reaper, never by claim."""

    def __init__(self, environment: str, user: int | None, live: "set[PinnedFence]") -> None:
        self._environment = environment
        self._user = user
        self._live = live
        self._child: LaunchedProcess | None = None

    def rlimits(self, limits: Limits) -> Mapping[int, int]:
        others = 0 if self._user is not None else _processes_of_user(os.getuid())
        return {
            resource.RLIMIT_AS: limits.memory_bytes,
            resource.RLIMIT_NPROC: limits.processes + others,
        }

    def start(self, launch: Launch, limits: Limits) -> LaunchedProcess:
        # Also bwrap: killed while it sets up its namespaces, it leaves a process that waits for it.
        self._child = start_below_reaper(launch) if launch.user is None else start(launch)
        self._live.add(self)
        return self._child

    def kill_all(self) -> None:
        """Neighbours may share the user: only the last one to end kills what they left."""
        child = self._child
        if child is None:
            return
        if not process_tree.is_alive(child.pid):
            self._live.discard(self)
        for pid in process_tree.below(child.pid):
            process_tree.kill(pid)
        if child.reaper is not None:
            end_below(child.reaper)
        elif self._user is not None and self._is_last():
            process_tree.kill_all_of_user(self._user)
        self._kill_strays()

    def _is_last(self) -> bool:
        return not any(
            fence._environment == self._environment for fence in self._live if fence is not self
        )

    def _kill_strays(self) -> None:
        """Kill orphans that came to this process because their reaper was killed."""
        known = process_tree.helpers | {
            fence._child.pid for fence in (*self._live, self) if fence._child is not None
        }
        for pid in set(process_tree.children(os.getpid())) - known:
            for stray in process_tree.below(pid):
                process_tree.kill(stray)

    def cpu_s(self) -> float:
        return 0.0

    def memory_kills(self) -> int:
        return 0

    def leave(self) -> None:
        """Its action is over."""
        self._live.discard(self)


class PinnedFences:
    """Where no control group can be written to."""

    name = "pinning"
    pins_for_good = False

    def __init__(self) -> None:
        self._live: set[PinnedFence] = set()

    def take(self, environment: str, user: int | None, cores: frozenset[int]) -> Fence:
        return PinnedFence(environment, user, self._live)

    def give_back(self, fence: Fence) -> None:
        assert isinstance(fence, PinnedFence)
        fence.leave()

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
