"""A week of requests and spot engines, kept for the planner."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from slackwater.runtime.services.workload_traces import WorkloadTraces


def rows(traces: WorkloadTraces, kind: str) -> list[str]:
    text = b"".join(traces.trace(kind)).decode()  # type: ignore[arg-type]  # of two literals
    return text.splitlines()


def test_what_was_served_and_which_spot_engines_were_here_outlives_the_service(
    tmp_path: Path,
) -> None:
    traces = WorkloadTraces(tmp_path / "traces")
    traces.record_served(2.0, 10, 3)
    traces.record_spot(["a", "b"])
    asyncio.run(traces.save())
    traces.record_served(0.5, 20, 4)
    traces.record_spot(["b"])
    assert len(rows(traces, "served")) == 3  # one is not saved yet
    asyncio.run(traces.save())
    again = WorkloadTraces(tmp_path / "traces")
    header, first, second = rows(again, "served")
    assert header == "t_s,prompt_tokens,output_tokens"
    assert first == "0.000,10,3" and second.endswith(",20,4")
    assert 1.4 < float(second.split(",")[0]) < 60
    spot = [row.split(",", 1)[1] for row in rows(again, "spot")]
    assert spot == ["event,instance_id", "add,a", "add,b", "remove,a"]


def test_half_a_row_is_left_out_and_a_full_disk_loses_rows_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    traces = WorkloadTraces(tmp_path)
    (tmp_path / "served-2020-01-01.csv").write_text("1.000,5,6\n2.000,7")
    (tmp_path / "served-2020-01-02.csv").write_text("\0\n3.000,8,9\n")
    assert rows(traces, "served")[1:] == ["0.000,5,6", "2.000,8,9"]
    in_the_way = tmp_path / "no-folder"
    in_the_way.write_text("")
    blocked = WorkloadTraces(in_the_way)
    blocked.record_served(1.0, 1, 1)
    asyncio.run(blocked.save())
    assert "traces for the planner are not kept" in caplog.text


def test_files_of_the_week_before_are_removed(tmp_path: Path) -> None:
    old, young = tmp_path / "served-2020-01-01.csv", tmp_path / "served-2020-01-09.csv"
    for path in (old, young):
        path.write_text("1.000,5,6\n")
    os.utime(old, (time.time() - 8 * 86_400,) * 2)
    traces = WorkloadTraces(tmp_path)
    asyncio.run(traces.save())
    assert not old.exists() and young.exists()
