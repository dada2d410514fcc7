"""The demo of five kinds of slack in virtual time, and its figures beside the live ones."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.slacks.demo_fleet import DemoFleet, DemoRunReport
from benchmarks.slacks.demo_processors import Look, ProcessorLog, ProcessorLooks
from benchmarks.slacks.demo_record import AloneMeasures, measures_of
from benchmarks.slacks.live import compared

ITERATIONS = 4
ACTIONS_S = 64 * 0.05 / 2  # of an iteration, on two cores
MEASURES = AloneMeasures(
    *(0.01, 0.05, {"dedicated": 0.3, "borrowed": 0.1}, 0.1),
    *(0.02, 0.3, 0.2, 0.1, 0.1),
    *(1, 2, 2),
    dict.fromkeys(("engine", "serving", "trainer", "action"), 1.0),
    (1, 2, 3, 4),
)


def printed(**more: Any) -> dict[str, Any]:
    """What the demo prints, of two jobs."""
    profile = {"rollout_s": 2.0, "train_s": 1.0, "sync_s": 0.0}
    job = {"iterations": ITERATIONS, "trained": ITERATIONS, "bound": 4.0, "profile": profile}
    return {
        "jobs": [{**job, "job": name} for name in ("one", "other")],
        "instance": {"started_s": 1.0, "lived_s": 5.0},
        "took_s": 28.0,
        "tokens": {"dedicated": 900, "borrowed": 100},
        "served": {"attainment": 0.9, "attainment_alone": 1.0, "median_s": 0.1},
        **more,
    }


def test_both_jobs_share_cores_and_a_full_engine_leaves_turns_to_lent_and_spot_ones() -> None:
    found = DemoFleet(printed(), MEASURES).report()
    least_s = 2 * (ITERATIONS - 1) * ACTIONS_S
    assert least_s - ACTIONS_S <= found.completed_s <= 2.5 * least_s
    assert 0.0 < found.spot_s < found.completed_s
    assert found.attainment == 1.0
    assert all(found.tokens[kind] > 0 for kind in ("dedicated", "borrowed", "spot"))


def test_an_engine_with_room_for_all_turns_leaves_fewer_to_others() -> None:
    few, many = (
        DemoFleet(printed(), replace(MEASURES, turns=turns)).report().tokens for turns in (1, 32)
    )
    assert few["dedicated"] < many["dedicated"]


def test_actions_take_longer_while_a_trainer_works() -> None:
    trained_s = DemoFleet(printed(), MEASURES).report().completed_s
    rows = [{**row, "trained": 0} for row in printed()["jobs"]]
    idle = replace(MEASURES, sync_s=0.001)
    assert DemoFleet(printed(jobs=rows), idle).report().completed_s < trained_s - ITERATIONS * 0.2


def test_what_needs_more_of_the_cores_makes_all_slower() -> None:
    twice = replace(MEASURES, processors=dict.fromkeys(MEASURES.processors, 2.0))
    less = replace(MEASURES, processors=dict.fromkeys(MEASURES.processors, 0.1))
    took_s = [DemoFleet(printed(), one).report().completed_s for one in (less, MEASURES, twice)]
    assert took_s[0] < took_s[1] < took_s[2]
    assert took_s[2] == pytest.approx(2 * took_s[1], rel=0.2)  # both fill the cores


def line(kind: str, now_s: float, commands: Mapping[str, Any], **body: Any) -> str:
    entry = {"event": {"type": kind, "body": {"now_s": now_s, **body}}}
    return json.dumps({**entry, "commands": [{"type": n, "body": b} for n, b in commands.items()]})


def iteration(start_s: float) -> tuple[list[str], list[str]]:
    """One turn of three tokens and its action, then an update, of a job alone."""
    turn, engine, version = f"t{start_s}", "engine~1", f"v{start_s}"
    spec = {"turn": turn, "job": "default/one-alone"}
    pull = {"instance": engine, "version": version}
    lend = {"LendNode": {"node": "engine"}}
    sent = {"DispatchTurn": {"turn": turn, "attempt": start_s, "instance": engine}}
    update = {"RunOp": {"ticket": start_s, "operation": {"kind": "optim_step"}}}
    save = {"RunOp": {"ticket": start_s + 1, "operation": {"kind": "save_weights"}}}
    borrowed = {"instance": engine, "kind": "borrowed", "max_running": 3}
    slow = {"instance": "slow~1", "version": version}
    fleet = [
        line("TurnSubmitted", start_s, lend, spec=spec),
        line("InstanceJoined", start_s + 0.5, {"PullVersion": pull}, spec=borrowed),
        line("InstanceJoined", start_s + 0.5, {"PullVersion": slow}, spec={**borrowed, **slow}),
        line("InstanceReady", start_s + 0.75, sent, **pull),
        line("InstanceReady", start_s + 1.25, {}, **slow),
        line("TurnEnded", start_s + 1.75, {}, attempt=start_s, total_tokens=3),
        line("OpSubmitted", start_s + 4.5, update, operation={"kind": "optim_step"}),
        line("TicketDone", start_s + 5.5, save, ticket=start_s),
        line("TicketDone", start_s + 5.625, {}, ticket=start_s + 1),
    ]
    begun = {"StartAction": {"spec": {"action": turn}}}
    actions = [
        line("ActionSubmitted", start_s + 2.25, begun),
        line("ActionFinished", start_s + 4.25, {}, action=turn),
    ]
    return fleet, actions


def seen(**used: float) -> ProcessorLooks:
    """Processors that did so much in the iterations after the first that ended, and more before and
    after; from the jobs together on they are half as fast.
    """
    looks = [Look(0.0, {}, 100.0), Look(16.0, dict.fromkeys(used, 5.0), 500.0)]
    looks += [Look(24.0, {kind: 5.0 + more for kind, more in used.items()}, 700.0)]
    return ProcessorLooks([*looks, Look(32.0, dict.fromkeys(used, 99.0), 300.0)])


def record(folder: Path) -> Path:
    """Four iterations of a job alone, and the first turn of another."""
    iterations = [iteration(start_s) for start_s in (0.0, 8.0, 16.0, 24.0)]
    dedicated = {"instance": "own", "kind": "dedicated", "max_running": 3}
    pulled = {"instance": "own", "version": "v"}
    fleet = [
        line("ServingNodeJoined", 0.0, {}, node="engine"),
        line("InstanceJoined", 0.0, {"PullVersion": pulled}, spec=dedicated),
        line("InstanceReady", 0.125, {}, **pulled),
        *(each for lines, _ in iterations for each in lines),
        line("TurnSubmitted", 31.0, {}, spec={"turn": "x", "job": "default/one"}),
        line("ServingNodeJoined", 32.0, {}, node="late"),
    ]
    (folder / "events.fleet.jsonl").write_text("\n".join(fleet))
    cores = line("WorkerJoined", 0.0, {}, capacity={"cores": [[0, 1], [2]]})
    actions = [each for _, lines in iterations for each in lines]
    (folder / "events.actions.jsonl").write_text("\n".join([cores, *actions]))
    return folder / "events"


def test_a_record_says_what_jobs_took_alone_and_nothing_of_what_they_took_together(
    tmp_path: Path,
) -> None:
    assert measures_of(record(tmp_path), seen()) == AloneMeasures(
        *(0.25, 2.0, {"dedicated": 0.125, "borrowed": 0.5}, 0.5),
        *(0.25, 2.5, 1.0, 0.125, 0.5),
        *(3, 3, 1),
        {"engine": 1.0, "serving": 0.0, "trainer": 0.0, "action": 0.0},
        (3, 3, 3, 3),
        speed=600.0,
        together_s=31.0,
    )


def test_what_is_used_beside_what_runs_is_divided_by_what_that_uses(tmp_path: Path) -> None:
    found = measures_of(record(tmp_path), seen(serving=0.5, action=1.0, beside=1.5, host=9.0))
    # a turn of a second and an action of two: half of both with what is beside them
    assert found.processors == {"engine": 1.0, "serving": 1.0, "trainer": 0.0, "action": 1.0}


def test_slower_processors_make_all_take_longer(tmp_path: Path) -> None:
    looks = seen()
    slower = measures_of(record(tmp_path), looks).speed / looks.speed([(31.0, 40.0)])
    assert slower == 2.0
    one, other = (DemoFleet(printed(), MEASURES.scaled(by)).report() for by in (1.0, slower))
    assert other.completed_s == pytest.approx(2 * one.completed_s, rel=0.2)


BURN = "import time\nwhile time.process_time() < 0.4: pass"
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {BURN!r}])
print("ended", flush=True)
sys.stdin.read()
"""


def test_processor_time_of_processes_that_have_ended_counts() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        began_s = time.monotonic()
        log = ProcessorLog(parent)
        log.look()
        assert parent.stdout.readline() == "ended\n"
        log.look()
        found = log.looks.used(began_s, time.monotonic())
        parent.stdin.close()
    found.pop("host", None)  # what a virtual machine lost meanwhile
    assert 0.3 < sum(found.values()) < 5.0


def test_every_measure_counts_for_the_least_and_the_most() -> None:
    tokens = {"dedicated": 900, "borrowed": 100, "local": 0}
    report = DemoRunReport(21.0, 5.0, 1.0, {"dedicated": 3, "spot": 1})
    found = compared(printed(tokens=tokens), report)
    assert found["completed_s_predicted_over_live"] == pytest.approx(0.75)
    assert found["attainment_predicted_over_live"] == pytest.approx(1 / 0.9)
    assert found["dedicated_tokens_predicted_over_live"] == pytest.approx(750 / 900)
    assert found["predicted_over_live_min"] == 0.0  # borrowed tokens that nobody foresaw
    assert 1e6 < found["predicted_over_live_max"] < float("inf")  # nobody sampled on spot
    assert found["local_tokens_predicted_over_live"] == 1.0
