"""Recorded runs and the planner's questions, without a service."""

import asyncio
import json
from pathlib import Path

import pytest

from slackwater.model.errors import ConfigError, NotFoundError, RefusedError
from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.serve.dashboard.recorded import RecordedSource
from slackwater.serve.dashboard.source import PlannedFleet, PlannedJob
from slackwater.serve.dashboard.what_if import FleetChange
from slackwater.timeline.lanes import (
    FAULT,
    KINDS,
    ROLLOUT,
    SYNC,
    TRAIN,
    LaneTimeline,
    TimelineWindow,
)
from slackwater.timeline.perfetto import lanes_json, trace_json
from slackwater.timeline.spans import Rental, Span, Timeline


def write_trace(path: Path) -> Path:
    """Two jobs of four iterations on one rollout and one train node."""
    spans = []
    for turn in range(8):
        job, other = JobId(f"mine/{'ab'[turn % 2]}"), JobId(f"mine/{'ba'[turn % 2]}")
        at_s = 10.0 * turn
        spans.append(Span(NodeId("rollout-0"), job, Phase.ROLLOUT, at_s, at_s + 8, "run"))
        spans.append(Span(NodeId("train-0"), other, Phase.TRAIN, at_s + 1, at_s + 7, "run"))
        spans.append(Span(NodeId("train-0"), other, Phase.TRAIN, at_s, at_s + 1, "switch"))
    rentals = tuple(Rental(NodeId(name), 0.0, 80.0) for name in ("rollout-0", "train-0"))
    drawn = Timeline("", "", "", 80.0, 0.0, tuple(spans), rentals)
    path.write_bytes(b"".join(trace_json(drawn)))
    return path


def test_a_trace_opens_with_its_lanes_jobs_and_time(tmp_path: Path) -> None:
    source = RecordedSource(write_trace(tmp_path / "run.json"))
    viewer = source.viewer(source.key)
    assert viewer is not None and source.viewer("guess") is None
    figures = source.snapshot(viewer)
    rows = {row["job"]: row for row in figures["jobs"]}
    assert rows["mine/a"]["iterations_done"] == 4
    assert rows["mine/a"]["breakdown"] == {
        "rollout": 32.0,
        "train": 24.0,
        "switch": 4.0,
        "queued": 17.0,
    }
    found = source.timeline.window(TimelineWindow(0.0, 80.0, 1000, 0, 10), source.now_s())
    assert found["lanes"] == [["rollout-0", "rollout nodes"], ["train-0", "train nodes"]]
    assert len(found["rows"][1]["spans"]) == 5 * 16
    assert found["rows"][0]["rents"] == [[0.0, 80.0]]
    json.dumps(figures)


def test_a_demos_folder_has_curves_and_logs_of_its_jobs(tmp_path: Path) -> None:
    write_trace(tmp_path / "timeline.json")
    folder = tmp_path / "service" / "jobs" / "mine" / "a"
    (folder / "run").mkdir(parents=True)
    lines = [json.dumps({"step": step, "reward": step / 10}) for step in range(5)]
    (folder / "run" / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 5, "rew']))
    (folder / "log-000000000000000").write_text("step 1\nstep 2\n")
    source = RecordedSource(tmp_path)
    viewer = source.viewer(source.key)
    assert viewer is not None
    facts = asyncio.run(source.job(viewer, "mine/a"))
    assert facts["curves"]["reward"] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert source.logs(viewer, "mine/a", -100)["text"] == "step 1\nstep 2\n"
    assert source.logs(viewer, "mine/b", -100)["text"] == ""
    with pytest.raises(NotFoundError):
        source.logs(viewer, "mine/none", 0)
    with pytest.raises(RefusedError):
        source.stop(viewer, "mine/a")


def test_a_service_leaves_the_lanes_of_its_engines_and_trainers(tmp_path: Path) -> None:
    """A job with a node is not counted again on the engine there; one without is."""
    timeline = LaneTimeline()
    node = timeline.lane("rollout-0", "rollout nodes")
    engine, trainer = timeline.lane("e-0", "spot engines"), timeline.lane("t-0", "trainers")
    for lane in (node, engine, trainer):
        lane.rented_s.append((0.0, None))
    timeline.add(node, "mine/placed", ROLLOUT, 0.0, 10.0)
    timeline.add(engine, "mine/placed", ROLLOUT, 0.0, 10.0)
    timeline.add(engine, "mine/placed", SYNC, 10.0, 12.0)
    timeline.add(engine, "mine/free", ROLLOUT, 12.0, 15.0)
    timeline.add(engine, "fault", FAULT, 15.0, 15.0)
    timeline.begin(trainer, "mine/free", TRAIN, 15.0)  # it runs when the service stops
    folder = StateDirectory(tmp_path)
    for _ in range(2):
        folder.write_timeline(b"".join(lanes_json(timeline, 20.0)))
    source = RecordedSource(tmp_path)
    viewer = source.viewer(source.key)
    assert viewer is not None
    figures = source.snapshot(viewer)
    rows = {row["job"]: row for row in figures["jobs"]}
    assert set(rows) == {"mine/placed", "mine/free"}
    assert rows["mine/placed"]["device_s"] == 12.0
    assert rows["mine/free"]["breakdown"] == {"rollout": 3.0, "train": 5.0, "queued": 0.0}
    assert figures["lanes"] == 3 and figures["gauges"] == {"busy": 0.5}
    found = source.timeline.window(TimelineWindow(0.0, 20.0, 1000, 0, 10), source.now_s())
    assert found["lanes"] == [
        ["rollout-0", "rollout nodes"],
        ["e-0", "spot engines"],
        ["t-0", "trainers"],
    ]
    kinds = [KINDS[int(kind)] for kind in found["rows"][1]["spans"][3::5]]
    assert kinds == ["rollout", "sync", "rollout", "fault"]


def test_a_recording_says_what_sharing_saved(tmp_path: Path) -> None:
    source = RecordedSource(write_trace(tmp_path / "run.json"))
    viewer = source.viewer(source.key)
    assert viewer is not None
    (row,) = source.snapshot(viewer)["slack"]
    assert row["alone"] * 3600 == pytest.approx(2 * (32 + 24) * 2, abs=1)
    assert row["used"] * 3600 == pytest.approx(160, abs=1)


def test_what_is_no_recording_is_refused_with_what_would_be_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no timelines"):
        RecordedSource(tmp_path)
    with pytest.raises(ConfigError, match="must be a trace"):
        RecordedSource(tmp_path / "none")
    (tmp_path / "x.json").write_text("[1")
    with pytest.raises(ConfigError, match="is no trace"):
        RecordedSource(tmp_path / "x.json")


def test_the_planner_gets_lengths_from_a_recording(tmp_path: Path) -> None:
    source = RecordedSource(write_trace(tmp_path / "run.json"))
    viewer = source.viewer(source.key)
    assert viewer is not None
    fleet = source.planner_fleet(viewer)
    assert (fleet.rollout_nodes, fleet.train_nodes) == (1, 1)
    assert [(job.job, job.rollout_s, job.train_s) for job in fleet.jobs] == [
        ("mine/a", 8.0, 6.0),
        ("mine/b", 8.0, 6.0),
    ]


def test_a_change_moves_nodes_takes_spot_away_or_sets_every_slo() -> None:
    job = PlannedJob("a", 8.0, 6.0, sync_s=0.0, slo=2.0)
    fleet = PlannedFleet(3, 1, spot_nodes=2, jobs=(job,))
    assert FleetChange(rollout_nodes=1).apply(fleet).rollout_nodes == 4
    assert FleetChange(without_spot=True).apply(fleet).rollout_nodes == 1
    assert FleetChange(train_nodes=2).apply(fleet).train_nodes == 3
    (tight,) = FleetChange(slo=1.5).apply(fleet).jobs
    assert tight.slo == 1.5
