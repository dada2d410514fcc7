"""One running action: its process, pipes and usage."""

import os
import time
from typing import Literal

from slackwater.sandbox.backends.port import Order
from slackwater.sandbox.environment import Environment
from slackwater.sandbox.fences import Fence, Precedence
from slackwater.sandbox.launch import LaunchedProcess
from slackwater.sandbox.reports import ActionEnded, End, Usage

_PIPE_BYTES = 1 << 16
_GRACE_CPU_S = 0.05  # CPU time during which an action has normal priority
_FAIR_SHARE = 0.25


def pick_precedence(used_s: float, recent_s: float, elapsed_s: float) -> Precedence:
    """The precedence of an action that used `used_s` of CPU time, `recent_s` of it in `elapsed_s`.

    While it gets a fair share of a core, it only takes idle time: other processes need not wait to
    preempt it, and may be scheduled on its core. Below that share it gets its weight back, so that
    it is not starved.
    """
    if used_s <= _GRACE_CPU_S:
        return Precedence.EQUAL
    return Precedence.LAST if recent_s >= _FAIR_SHARE * elapsed_s else Precedence.LOW


class RunningAction:
    """From fork to the last report."""

    def __init__(
        self,
        order: Order,
        environment: Environment,
        fence: Fence,
        child: LaunchedProcess,
        requested_s: float,
    ) -> None:
        self.order = order
        self.environment = environment
        self.fence = fence
        self.child = child
        self.requested_s = requested_s
        self.began_s = child.began_s
        self.memory_kills = fence.memory_kills()
        self.cpu_s = fence.cpu_s()
        self._last_sample = (self.began_s, self.cpu_s)
        self.killed: tuple[End, str] | None = None
        self._unsent = memoryview(order.stdin)
        self._printed_bytes = 0

    @property
    def deadline_s(self) -> float:
        return self.requested_s + self.order.limits.wall_s

    def set_precedence(self, now_s: float) -> None:
        """Set the precedence from the CPU time since the last call."""
        before_s, before_cpu_s = self._last_sample
        cpu_s = self.fence.cpu_s()
        self._last_sample = now_s, cpu_s
        self.fence.set_precedence(
            pick_precedence(cpu_s - self.cpu_s, cpu_s - before_cpu_s, now_s - before_s)
        )

    @property
    def descriptors(self) -> tuple[int, int, int, int]:
        """Its process and pipes; those that are closed are negative."""
        child = self.child
        return child.pidfd, child.stdin, child.stdout, child.stderr

    def feed(self) -> bool:
        """Write input until the pipe is full; whether all is written."""
        try:
            while self._unsent:
                self._unsent = self._unsent[
                    os.write(self.child.stdin, self._unsent[:_PIPE_BYTES]) :
                ]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            pass
        return True

    def read(self, stream: Literal["stdout", "stderr"]) -> bytes | None:
        """New output: b"" at its end, None if nothing is ready; excess is dropped."""
        try:
            data = os.read(getattr(self.child, stream), _PIPE_BYTES)
        except BlockingIOError:
            return None
        remaining = self.order.limits.output_bytes - self._printed_bytes
        self._printed_bytes += len(data)
        return data[: max(remaining, 0)] if data else b""

    @property
    def is_flooding(self) -> bool:
        return self._printed_bytes > self.order.limits.output_bytes

    def finish(self) -> ActionEnded:
        """Reap the process and build the report."""
        ended_s = time.monotonic()
        exit_info = self.child.reap()
        status = os.waitstatus_to_exitcode(exit_info.status)
        usage = Usage(
            launch_s=self.began_s - self.requested_s,
            run_s=ended_s - self.began_s,
            cpu_s=max(exit_info.user_s + exit_info.system_s, self.fence.cpu_s() - self.cpu_s),
            max_rss_bytes=exit_info.max_rss_kib * 1024,
        )
        end, reason = self.killed or (End.EXITED, "")
        if self.fence.memory_kills() > self.memory_kills:
            limit = self.order.limits.memory_bytes
            end, reason = End.MEMORY, f"it used more than {limit} bytes of memory"
        return ActionEnded(self.order.action, end, status, usage, reason)
