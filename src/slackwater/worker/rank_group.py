"""The processes of one worker: one for each device of its deployment, or one that starts its own.
They begin together, and all end when one does.
"""

import os
import queue
import signal
import subprocess
import threading
from pathlib import Path

from slackwater.model.device import CUDA, Device
from slackwater.wire import agent as says
from slackwater.worker.node_devices import VISIBLE_VARIABLE
from slackwater.worker.template import WorkerTemplate


def _rank_devices(order: says.StartWorker) -> list[tuple[Device, ...]]:
    if order.one_process or not order.devices:
        return [order.devices]
    return [(device,) for device in order.devices]


def _rank_environment(order: says.StartWorker, rank: int, meeting: Path) -> dict[str, str]:
    """What a rank has in its environment beside what every worker has."""
    found: dict[str, str] = {}
    ranks = _rank_devices(order)
    if ranks[rank] and ranks[rank][0].kind == CUDA:
        found[VISIBLE_VARIABLE] = ",".join(device.visible for device in ranks[rank])
    if len(ranks) > 1:
        found |= {
            says.RANK: str(rank),
            says.WORLD_SIZE: str(len(ranks)),
            says.RENDEZVOUS: f"file://{meeting}",
            says.LAYOUT: order.layout,
        }
    return found


class RankGroup:
    """`OSError` if a process cannot be started; then none is left."""

    def __init__(
        self,
        order: says.StartWorker,
        command: list[str],
        environment: dict[str, str],
        logs: Path,
        template: WorkerTemplate,
    ) -> None:
        self.order = order
        self._meeting = (logs / f"{order.worker}.rendezvous").absolute()
        self._meeting.unlink(missing_ok=True)  # of a worker of that name before
        self._logs: list[tuple[Path, int]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, devices in enumerate(_rank_devices(order)):
                own = _rank_environment(order, rank, self._meeting)
                name = order.log if rank == 0 else f"{order.log}.rank{rank}"
                log = logs / f"{name}.log"
                with log.open("ab") as output:
                    self._logs.append((log, output.tell()))
                    self.processes.append(
                        template.start(command, environment | own, output.fileno())
                    )
                if cores := [core for device in devices for core in device.cores]:
                    os.sched_setaffinity(self.processes[rank].pid, cores)
        except OSError:
            self.signal_all(signal.SIGKILL)
            raise

    @property
    def pid(self) -> int:
        """Of rank 0."""
        return self.processes[0].pid

    def signal_all(self, number: int) -> None:
        """To every rank that lives."""
        for process in self.processes:
            process.send_signal(number)

    def wait(self) -> tuple[int, Path, int]:
        """Until one has ended, whereupon all do: its status, its log, and where that began."""
        first, status = 0, 0
        if len(self.processes) == 1:
            status = self.processes[0].wait()
        else:
            first, status = self._wait_for_any()
            self.signal_all(signal.SIGKILL)
            for process in self.processes:
                process.wait()
            self._meeting.unlink(missing_ok=True)
        return (status, *self._logs[first])

    def _wait_for_any(self) -> tuple[int, int]:
        ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

        def wait(rank: int) -> None:
            ended.put((rank, self.processes[rank].wait()))

        for rank in range(len(self.processes)):
            threading.Thread(target=wait, args=(rank,), daemon=True).start()
        return ended.get()
