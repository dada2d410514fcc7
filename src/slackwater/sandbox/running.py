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
_SHORT_S = 0.05  # of processor time, until which an action is as good as any other process
_ENOUGH_OF_A_CORE = 0.25


def precedence(used_s: float, lately_s: float, elapsed_s: float) -> Precedence:
    """Of an action that used so much processor time in all, and `lately_s` in `elapsed_s`.

    While it has a fair part of a core, it takes what others leave: nobody waits until it is
    interrupted, and what wakes up elsewhere may run on its core. When it has less, it has its
    weight again, so nobody starves it.
    """
    if used_s <= _SHORT_S:
        return Precedence.EQUAL
    return Precedence.LAST if lately_s >= _ENOUGH_OF_A_CORE * elapsed_s else Precedence.LOW


class RunningAction:
    """From fork to the last report."""

    def __init__(
        self,
        order: Order,
        environment: Environment,
        fence: Fence,
        child: LaunchedProcess,
        asked_s: float,
    ) -> None:
        self.order = order
        self.environment = environment
        self.fence = fence
        self.child = child
        self.asked_s = asked_s
        self.began_s = child.began_s
        self.memory_kills = fence.memory_kills()
        self.cpu_s = fence.cpu_s()
        self._looked = (self.began_s, self.cpu_s)
        self.killed: tuple[End, str] | None = None
        self._unsent = memoryview(order.stdin)
        self._printed_bytes = 0

    @property
    def deadline_s(self) -> float:
        return self.asked_s + self.order.limits.wall_s

    def set_precedence(self, now_s: float) -> None:
        """By what it used since the last look."""
        before_s, before_cpu_s = self._looked
        cpu_s = self.fence.cpu_s()
        self._looked = now_s, cpu_s
        self.fence.set_precedence(
            precedence(cpu_s - self.cpu_s, cpu_s - before_cpu_s, now_s - before_s)
        )

    def feed(self) -> bool:
        """Write what the pipe takes of its input; whether there is nothing more to write."""
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
        room = self.order.limits.output_bytes - self._printed_bytes
        self._printed_bytes += len(data)
        return data[: max(room, 0)] if data else b""

    @property
    def is_flooding(self) -> bool:
        return self._printed_bytes > self.order.limits.output_bytes

    def over(self) -> ActionEnded:
        """Reap the process and build the report."""
        ended_s = time.monotonic()
        found = self.child.reap()
        code = os.waitstatus_to_exitcode(found.status)
        usage = Usage(
            launch_s=self.began_s - self.asked_s,
            run_s=ended_s - self.began_s,
            cpu_s=max(found.user_s + found.system_s, self.fence.cpu_s() - self.cpu_s),
            max_rss_bytes=found.max_rss_kib * 1024,
            output_bytes=min(self._printed_bytes, self.order.limits.output_bytes),
        )
        end, reason = self.killed or (End.EXITED, "")
        if self.fence.memory_kills() > self.memory_kills:
            most = self.order.limits.memory_bytes
            end, reason = End.MEMORY, f"it used more than {most} bytes of memory"
        return ActionEnded(self.order.action, end, code, usage, reason)
