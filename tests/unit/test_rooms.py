"""Who may import whom: the table of rooms, held by the code."""

import re
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

# A room imports itself and what its line names. `cli` may import anything; nothing imports it.
MAY_IMPORT = {
    "model": "",
    "policy": "model",
    "control": "model policy",
    "wire": "model",
    "timeline": "model",
    "sim": "model policy control timeline",
    "runtime": "model policy control wire timeline",
    "serve": "model wire runtime timeline grammar",
    "nets": "model weights",
    "tensors": "model",
    "zoo": "model nets tensors",
    "engine": "model nets policy",
    "grammar": "model",
    "training": "model nets tensors weights",
    "weights": "model policy wire tensors",
    "state": "model policy control wire tensors",
    "sandbox": "model wire",
    "worker": "model policy wire nets tensors weights state engine training zoo sandbox grammar",
    "rl": "model",
    "phases": "model state",
}
FREE = {"cli"}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("slackwater", cache_dir=None)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else None


def test_every_room_has_its_line(graph: grimp.ImportGraph) -> None:
    rooms = {room_of(module) for module in graph.modules} - {None}
    assert rooms == set(MAY_IMPORT) | FREE


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_its_line_names(graph: grimp.ImportGraph, room: str) -> None:
    allowed = {room, *MAY_IMPORT[room].split()}
    strays = [
        f"{module} imports {imported}"
        for module in graph.modules
        if room_of(module) == room
        for imported in graph.find_modules_directly_imported_by(module)
        if room_of(imported) not in allowed
    ]
    assert strays == []


PLANNER = ("cli.main", "cli.plan", "cli.sim")


def test_the_planner_loads_only_what_the_package_asks_for_without_extras() -> None:
    graph = grimp.build_graph("slackwater", include_external_packages=True, cache_dir=None)
    loaded: set[str] = set()
    for command in PLANNER:
        loaded |= graph.find_upstream_modules(f"slackwater.{command}")
    # `sim results` loads benchmarks, which an installed wheel does not have, from a checkout.
    outside = {name for name in loaded if name.split(".")[0] not in ("slackwater", "benchmarks")}
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    asked_for = {re.split(r"[^a-z]", line)[0] for line in project["dependencies"]}
    talks = {"httpx"}  # to a service, with --from-service alone
    assert outside - sys.stdlib_module_names - asked_for == talks
