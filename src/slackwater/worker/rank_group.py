"""The processes of one worker: one per device of its deployment, or one that starts its own.

They start together, and all end when one does.
"""

import os
import queue
import signal
import subprocess
import threading
from pathlib import Path

from slackwater.model.device import CUDA, Device
from slackwater.wire import agent as wire
from slackwater.worker.node_devices import VISIBLE_VARIABLE
from slackwater.worker.template import WorkerTemplate


def _rank_devices(order: wire.StartWorker) -> list[tuple[Device, ...]]:
    if order.one_process or not order.devices:
        return [order.devices]
    return [(device,) for device in order.devices]


def _rank_environment(order: wire.StartWorker, rank: int, rendezvous: Path) -> dict[str, str]:
    """The variables of one rank, in addition to those of every worker."""
    variables: dict[str, str] = {}
    ranks = _rank_devices(order)
    if ranks[rank] and ranks[rank][0].kind == CUDA:
        variables[VISIBLE_VARIABLE] = ",".join(device.visible for device in ranks[rank])
    if len(ranks) > 1:
        variables |= {
            wire.RANK: str(rank),
            wire.WORLD_SIZE: str(len(ranks)),
            wire.RENDEZVOUS: f"file://{rendezvous}",
            wire.LAYOUT: order.layout,
        }
    return variables


class RankGroup:
    """Starts all ranks; OSError if one cannot be started, and then none is left."""

    def __init__(
        self,
        order: wire.StartWorker,
        command: list[str],
        environment: dict[str, str],
        logs: Path,
        template: WorkerTemplate,
    ) -> None:
        self.order = order
        self._rendezvous = (logs / f"{order.worker}.rendezvous").absolute()
        self._rendezvous.unlink(missing_ok=True)  # left by an earlier worker of this name
        self._logs: list[tuple[Path, int]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, devices in enumerate(_rank_devices(order)):
                rank_environment = _rank_environment(order, rank, self._rendezvous)
                name = order.log if rank == 0 else f"{order.log}.rank{rank}"
                log = logs / f"{name}.log"
                with log.open("ab") as output:
                    self._logs.append((log, output.tell()))
                    self.processes.append(
                        template.start(command, environment | rank_environment, output.fileno())
                    )
                if cores := [core for device in devices for core in device.cores]:
                    os.sched_setaffinity(self.processes[rank].pid, cores)
        except OSError:
            self.signal_all(signal.SIGKILL)
            raise

    @property
    def pid(self) -> int:
        """The pid of rank 0."""
        return self.processes[0].pid

    def signal_all(self, number: int) -> None:
        """Signal every rank that is alive."""
        for process in self.processes:
            process.send_signal(number)

    def wait(self) -> tuple[int, Path, int]:
        """Wait until one rank ends, then end all: its status, its log and its offset there."""
        first, status = 0, 0
        if len(self.processes) == 1:
            status = self.processes[0].wait()
        else:
            first, status = self._wait_for_any()
            self.signal_all(signal.SIGKILL)
            for process in self.processes:
                process.wait()
            self._rendezvous.unlink(missing_ok=True)
        return (status, *self._logs[first])

    def _wait_for_any(self) -> tuple[int, int]:
        ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

        def wait(rank: int) -> None:
            ended.put((rank, self.processes[rank].wait()))

        for rank in range(len(self.processes)):
            threading.Thread(target=wait, args=(rank,), daemon=True).start()
        return ended.get()
