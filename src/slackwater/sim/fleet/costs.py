"""Times of a simulated fleet, apart from the phases."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MachineShare:
    """Nodes that are single cores of one machine, which also runs the control plane and drivers.

    For every second of a phase these use `rollout_load` or `train_load` seconds of processor time,
    first of cores without a phase, then of those with one. `both_slow` is how much longer work
    takes while all cores compute (shared caches and memory).
    """

    cores: int
    rollout_load: float = 0.0
    train_load: float = 0.0
    both_slow: float = 1.0

    def pace(self, rollouts: int, trains: int) -> float:
        """The speed of each phase while this many run; 1 is full speed."""
        running = rollouts + trains
        load = rollouts * self.rollout_load + trains * self.train_load
        taken = max(load - max(self.cores - running, 0), 0.0)
        pace = max(1 - taken / max(running, 1), 0.05)
        return pace / self.both_slow if running >= self.cores > 1 else pace


@dataclass(frozen=True, slots=True)
class FleetCosts:
    """Seconds: `load_s` of a model's state on a trainer, `switch_s` of a node between jobs,
    `pull_s` of a version by an engine, `start_s` of a process, `handover_s` from the last response
    to the operations on it, `repair_s` of a crashed driver.
    """

    load_s: float = 40.0
    switch_s: float = 2.0
    pull_s: float = 3.0
    start_s: float = 1.0
    handover_s: float = 0.0
    repair_s: float = 600.0
    share: MachineShare | None = None
