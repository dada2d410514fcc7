"""A backlog on a fleet that is paid for anyway: done sooner than by spreading and backfilling, and
every SLO kept.
"""

from dataclasses import replace

import msgspec
import pytest

from slackwater.model.node import H20, H800, Pool, Role
from slackwater.sim.cluster.report import RunReport
from slackwater.sim.cluster.scenario import (
    ClusterScenario,
    FaultConfig,
    LengthConfig,
    PolicyConfig,
)
from slackwater.sim.cluster.simulate import replay_run, simulate
from slackwater.sim.cluster.workload import CycleWorkload

BACKLOGS = range(40, 44)


def backlog(seed: int, policy: str = "ours") -> ClusterScenario:
    return ClusterScenario(
        fleet=(
            Pool(Role.ROLLOUT, H20, 256, owned=True),
            Pool(Role.TRAIN, H800, 8, owned=True),
        ),
        workload=CycleWorkload(jobs=40, span_s=8 * 3600.0),
        policy=PolicyConfig(name=policy),
        seed=seed,
    )


def assert_all_done_within_slo(report: RunReport) -> None:
    assert report.finished == len(report.jobs)
    assert [row.job for row in report.jobs if not row.kept_slo] == []


def test_backlogs_are_done_sooner_than_by_spreading_and_backfilling() -> None:
    ours, spread = 0.0, 0.0
    for seed in BACKLOGS:
        report = simulate(backlog(seed))
        assert_all_done_within_slo(report)
        ours += report.end_s
        spread += simulate(backlog(seed, "spread_backfill")).end_s
    assert ours < spread


@pytest.mark.parametrize("seed", [1, 2])
def test_slos_hold_there_with_drawn_lengths_and_faults(seed: int) -> None:
    faulty = replace(
        backlog(seed),
        lengths=LengthConfig(kind="long_tail"),
        faults=FaultConfig(
            job_crashes_per_h=0.5, node_losses_per_h=0.05, doubled_message_share=0.05
        ),
    )
    assert_all_done_within_slo(simulate(faulty, check_every=20))


def test_its_record_replays() -> None:
    lines: list[bytes] = []
    simulate(backlog(3), record=lines.append)
    assert msgspec.json.decode(lines[0])["scenario"]["fleet"][1]["owned"] is True
    events, divergence = replay_run(lines)
    assert divergence is None
    assert events == len(lines) - 1
