"""`docs/reference/scenario-files.md` names every setting there is."""

import dataclasses
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from slackwater.sim.inputs.scenario_file import ScenarioFile

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "scenario-files.md"


def settings(cls: Any) -> Iterator[tuple[str, str]]:
    """Names of all fields of a dataclass and of those inside it."""
    for name, hint in get_type_hints(cls).items():
        yield cls.__name__, name
        for inner in dataclasses_in(hint):
            yield from settings(inner)


def dataclasses_in(hint: Any) -> Iterator[Any]:
    if dataclasses.is_dataclass(hint):
        yield hint
    elif get_origin(hint) in (Union, types.UnionType, tuple):
        for arm in get_args(hint):
            yield from dataclasses_in(arm)


def test_every_setting_is_on_the_page() -> None:
    page = PAGE.read_text()
    missing = {
        f"{cls}.{name}"
        for cls, name in settings(ScenarioFile)
        if f"`{name}`" not in page
        and f".{name}`" not in page
        and f"[[{name}]]" not in page
        and f"[{name}]" not in page
        and f"[{name}." not in page
    }
    assert missing <= {"FleetEntry.rollout", "FleetEntry.train"}
    assert len(set(settings(ScenarioFile))) > 60
