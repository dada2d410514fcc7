"""The report of a simulated run."""

from dataclasses import dataclass

from slackwater.model.ids import GroupId, JobId
from slackwater.model.placement import Strategy
from slackwater.timeline.spans import CostStep, Rental, Span, Timeline


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job's run. Times are None for what did not happen.

    `queued_s` runs from arrival to placement, `start_delay_s` (its first load is in it) from there
    to its first permit. `elapsed_s`, from the first permit to the last iteration's end (or to the
    run's end), is what the SLO bounds by `bound_s = slo * iterations * declared solo_s`. Moves are
    in it. A crash sets it back to the start of the broken iteration, and it stands still until the
    next permit. `shortest_stay_s` is the shortest time between two placements of it.
    `solo_realised_s` is what the same drawn lengths would have taken alone.
    """

    job: JobId
    slo: float
    iterations: int
    iterations_done: int
    arrival_s: float
    placed_s: float | None
    finished_s: float | None
    queued_s: float
    start_delay_s: float
    elapsed_s: float
    bound_s: float
    solo_realised_s: float
    kept_slo: bool
    kept_slo_realised: bool
    iterations_in_bound: int
    strategy: Strategy | None
    group: GroupId | None
    moves: int
    crashes: int
    reason: str
    shortest_stay_s: float | None = None

    @property
    def slowdown_realised(self) -> float:
        """Against the same drawn lengths run alone."""
        return self.elapsed_s / self.solo_realised_s if self.solo_realised_s else 0.0


@dataclass(frozen=True, slots=True)
class PoolUse:
    """How a pool's rented node time was spent, in node-hours."""

    rented_h: float
    run_h: float
    switch_h: float
    peak_nodes: int

    @property
    def bubble_share(self) -> float:
        """Of rented time, the part in which nothing ran."""
        return 1 - (self.run_h + self.switch_h) / self.rented_h if self.rented_h else 0.0


@dataclass(frozen=True, slots=True)
class RunReport:
    """One policy on one scenario."""

    scenario: str
    policy: str
    ordering: str
    seed: int
    events: int
    end_s: float
    cost: float
    jobs: tuple[JobRow, ...]
    refusals: tuple[tuple[JobId, str], ...]
    admissions: dict[str, int]
    rollout: PoolUse
    train: PoolUse
    switches: int
    moves: int
    tail_migrations: int
    spans: tuple[Span, ...] = ()
    rentals: tuple[Rental, ...] = ()
    cost_steps: tuple[CostStep, ...] = ()

    @property
    def cost_per_h(self) -> float:
        """Mean over the run."""
        return self.cost / (self.end_s / 3600) if self.end_s else 0.0

    @property
    def finished(self) -> int:
        """Jobs that made all their iterations."""
        return sum(row.finished_s is not None for row in self.jobs)

    @property
    def slo_attainment(self) -> float:
        """Share of placed jobs that kept their bound."""
        placed = [row for row in self.jobs if row.placed_s is not None]
        return sum(row.kept_slo for row in placed) / len(placed) if placed else 1.0

    @property
    def slo_attainment_realised(self) -> float:
        """The same against the job's own drawn lengths run alone (with drift in them)."""
        placed = [row for row in self.jobs if row.placed_s is not None]
        return sum(row.kept_slo_realised for row in placed) / len(placed) if placed else 1.0

    @property
    def shortest_stay_s(self) -> float | None:
        """The shortest time between two placements of one job; None if no job moved."""
        stays = [row.shortest_stay_s for row in self.jobs if row.shortest_stay_s is not None]
        return min(stays, default=None)

    @property
    def iterations_in_bound_share(self) -> float:
        """Of all iterations, those that took at most slo * declared solo_s."""
        done = sum(row.iterations_done for row in self.jobs)
        return sum(row.iterations_in_bound for row in self.jobs) / done if done else 1.0

    def timeline(self) -> Timeline:
        """The run as a timeline to draw."""
        title = (
            rf"{self.scenario}, policy {self.policy}: {self.cost:,.0f} \$ "
            rf"({self.cost_per_h:,.1f} \$/h), SLO kept by {self.slo_attainment:.1%}, "
            f"bubbles {self.rollout.bubble_share:.0%} of rollout "
            f"and {self.train.bubble_share:.0%} of train node time"
        )
        return Timeline(
            label=self.policy,
            title=title,
            note=f"SLO {self.slo_attainment:.1%}",
            end_s=self.end_s,
            cost=self.cost,
            spans=self.spans,
            rentals=self.rentals,
            cost_steps=self.cost_steps,
            about={"scenario": self.scenario, "policy": self.policy, "seed": self.seed},
        )
