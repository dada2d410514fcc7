"""`slackwater up` on a machine with several devices: each worker has one of its own."""

import os
from pathlib import Path

import pytest

from harness.ports import free_port
from slackwater.model.device import core_slices

from .service_process import ServiceProcess, wait_for

pytestmark = pytest.mark.process


def test_four_virtual_devices_have_a_trainer_and_three_engines(
    tiny_model: Path, tmp_path: Path
) -> None:
    service = ServiceProcess(tmp_path / "state", tiny_model, free_port(), "--devices", "4")
    service.start()
    try:
        # Processes, not workers that have joined: their devices are settled when they begin.
        wait_for("four processes", lambda: len(service.status()["pids"]) == 4)
        (node,) = service.get("/slackwater/nodes").json()["nodes"]
        pids = service.status()["pids"]
        owners = {row["device"]: row["owners"] for row in node["devices"]}
        slices = core_slices(sorted(os.sched_getaffinity(0)), 4)
        seen = {name: os.sched_getaffinity(pid) for name, pid in pids.items()}
    finally:
        service.stop()
    assert owners == {
        "local/cpu:0": ["trainer-0"],
        "local/cpu:1": ["engine-0-0"],
        "local/cpu:2": ["engine-0-1"],
        "local/cpu:3": ["engine-0-2"],
    }
    for (owner,), cores in zip(owners.values(), slices, strict=True):
        assert seen[f"{owner}.1"] == set(cores)
    assert "device local/cpu:3   engine-0-2" in (tmp_path / "state" / "up.log").read_text()


def test_jobs_with_parts_of_a_node_run_side_by_side_and_one_with_all_of_it_waits(
    tiny_model: Path, tmp_path: Path
) -> None:
    options = ("--devices", "4", "--engines", "2", "--trainers", "2")
    shares = ("--set", "coschedule.placement=group", "--set", "coschedule.limits.lease_s=600")
    service = ServiceProcess(tmp_path / "state", tiny_model, free_port(), *options, *shares)
    service.start()
    try:
        profile = {"rollout_s": 1.0, "train_s": 5.0}
        part = {"rollout_layout": "tp=1", "train_layout": "tp=1"}
        for name, layouts in (("small", part), ("other", part), ("whole", {})):
            body = {"name": name, "iterations": 50, "slo": 1.0, "profile": profile, **layouts}
            assert service.post("/slackwater/jobs", body).status_code == 201
        asked = {"phase": "rollout", "iteration": 0}
        permits = [
            service.post(f"/slackwater/jobs/{name}/permits", asked).json()
            for name in ("small", "other")
        ]
        state = service.get("/slackwater/coschedule").json()
        jobs = {row["job"].removeprefix("default/"): row for row in state["jobs"]}
        (row,) = (row for row in state["nodes"] if row["node"] == "rollout-0")
    finally:
        service.stop()
    held = sorted(permit["nodes"] for permit in permits)
    assert held == [["rollout-0/0"], ["rollout-0/1"]], "each has one of the two engines"
    assert jobs["whole"]["stage"] == "held" and row["job"] is not None
