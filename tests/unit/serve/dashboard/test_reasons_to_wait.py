"""What the dashboard says of a job that waits."""

from typing import Any

from slackwater.serve.dashboard.live import waiting_reason


def row(job: str, **more: Any) -> dict[str, Any]:
    return {"job": f"mine/{job}", "stage": "running", "reason": "", **more}


def test_a_job_of_a_group_waits_for_who_holds_the_groups_nodes() -> None:
    waits = row("a", group="g0", waits_s=1.25)
    rows = [waits, row("b", group="g0", phase="train"), row("c", group="g1", phase="rollout")]
    assert waiting_reason(waits, rows) == "waits 1.2 s for its turn while b (train) holds the nodes"


def test_a_job_without_a_group_waits_for_any_nodes_and_few_holders_are_named() -> None:
    waits = row("new", group=None, waits_s=3.0, stage="profiling")
    rows = [row(f"j{n}", group=f"g{n}", phase="train") for n in range(5)]
    said = waiting_reason(waits, [waits, *rows])
    assert said.endswith("while j0 (train), j1 (train), j2 (train) and 2 more hold the nodes")


def test_a_job_that_is_held_has_the_planners_reason_and_one_that_runs_has_none() -> None:
    held = row("a", stage="held", reason="no nodes are free")
    assert waiting_reason(held, [held]) == "no nodes are free"
    runs = row("b", group="g0", phase="train", waits_s=None)
    assert waiting_reason(runs, [held, runs]) == ""
