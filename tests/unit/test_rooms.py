"""Which package may import which, and that no files import each other in a circle."""

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
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
SOURCE = Path(__file__).parents[2] / "src" / "slackwater"


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("slackwater", cache_dir=None)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else None


def test_no_file_is_longer_than_500_lines() -> None:
    long = [
        path.as_posix()
        for path in SOURCE.rglob("*.py")
        if len(path.read_text(encoding="utf-8").splitlines()) > 500
    ]
    assert long == []


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


def find_cycle(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """A circle of importers, or nothing."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def file_imports(graph: grimp.ImportGraph) -> dict[str, set[str]]:
    """Imports inside functions and those for type checkers count, too."""
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def test_no_files_import_each_other(graph: grimp.ImportGraph) -> None:
    assert find_cycle(file_imports(graph)) == []


def test_the_table_has_an_order() -> None:
    assert find_cycle({room: allowed.split() for room, allowed in MAY_IMPORT.items()}) == []


@pytest.mark.parametrize(
    "indented",
    ["import TYPE_CHECKING\nif TYPE_CHECKING:\n", "import cast\ndef load() -> None:\n"],
)
def test_a_circle_is_found(indented: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "circular"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "wheel.py").write_text("from circular import axle\n")
    (package / "axle.py").write_text(f"from typing {indented}    from circular import wheel\n")
    monkeypatch.syspath_prepend(tmp_path)
    imports = file_imports(grimp.build_graph("circular", cache_dir=None))
    assert set(find_cycle(imports)) == {"circular.wheel", "circular.axle"}


PLANNER = ("cli.main", "cli.plan", "cli.sim")


def test_the_planner_loads_only_what_the_package_asks_for_without_extras() -> None:
    graph = grimp.build_graph("slackwater", include_external_packages=True, cache_dir=None)
    loaded: set[str] = set()
    for command in PLANNER:
        loaded |= graph.find_upstream_modules(f"slackwater.{command}")
    outside = {name for name in loaded if not name.startswith("slackwater.")}
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    asked_for = {re.split(r"[^a-z]", line)[0] for line in project["dependencies"]}
    talks = {"httpx"}  # to a service, with --from-service alone
    assert outside - sys.stdlib_module_names - asked_for == talks
