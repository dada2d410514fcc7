"""Reports made by hand, small enough to know every span."""

from slackwater.model.ids import GroupId, JobId, NodeId
from slackwater.model.placement import Phase, Strategy
from slackwater.sim.cluster.report import JobRow, PoolUse, RunReport
from slackwater.timeline.spans import CostStep, Rental, Span


def job_row(name: str, end_s: float) -> JobRow:
    return JobRow(
        job=JobId(name),
        slo=1.5,
        iterations=4,
        iterations_done=4,
        arrival_s=0.0,
        placed_s=0.0,
        finished_s=end_s,
        queued_s=0.0,
        start_delay_s=0.0,
        elapsed_s=end_s,
        bound_s=1.5 * end_s,
        solo_realised_s=0.9 * end_s,
        kept_slo=True,
        kept_slo_realised=True,
        iterations_in_bound=4,
        strategy=Strategy.PACK,
        group=GroupId("group-0"),
        moves=0,
        crashes=0,
        reason="fits in bubbles",
    )


def two_jobs_taking_turns(cycles: int = 4, policy: str = "ours") -> RunReport:
    """Jobs a and b, 100 s rollout and 80 s train each, 5 s of switch before every phase, period 210
    s.
    """
    spans = []
    for cycle in range(cycles):
        for number, name in enumerate(("a", "b")):
            at_s = 210.0 * cycle + 105.0 * number
            rollout, train = NodeId("rollout-0"), NodeId("train-0")
            job = JobId(name)
            spans += [
                Span(rollout, job, Phase.ROLLOUT, at_s, at_s + 5, "switch"),
                Span(rollout, job, Phase.ROLLOUT, at_s + 5, at_s + 105, "run"),
                Span(train, job, Phase.TRAIN, at_s + 105, at_s + 110, "switch"),
                Span(train, job, Phase.TRAIN, at_s + 110, at_s + 190, "run"),
            ]
    end_s = 210.0 * cycles + 90
    hours = end_s / 3600
    return RunReport(
        scenario="handmade",
        policy=policy,
        ordering="plan",
        seed=0,
        events=8 * cycles,
        end_s=end_s,
        cost=57.04 * hours,
        jobs=(job_row("a", end_s), job_row("b", end_s)),
        refusals=(),
        admissions={"isolate": 1, "pack": 1},
        rollout=PoolUse(hours, 200.0 * cycles / 3600, 10.0 * cycles / 3600, 1),
        train=PoolUse(hours, 160.0 * cycles / 3600, 10.0 * cycles / 3600, 1),
        switches=4 * cycles,
        moves=0,
        tail_migrations=0,
        spans=tuple(spans),
        rentals=(
            Rental(NodeId("rollout-0"), 0.0, end_s),
            Rental(NodeId("train-0"), 0.0, end_s),
        ),
        cost_steps=(CostStep(0.0, 57.04),),
    )
