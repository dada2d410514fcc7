"""Tables become dataclasses; what is wrong is named in one line."""

import tomllib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.model.config import decode, override, plain
from slackwater.model.errors import ConfigError
from slackwater.model.toml_text import toml_text


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Square:
    side_s: float
    kind: Literal["square"] = "square"


@dataclass(frozen=True, slots=True)
class Circle:
    radius_gb: float
    fill: Literal["full", "empty"] = "full"
    kind: Literal["circle"] = "circle"


@dataclass(frozen=True, slots=True)
class Sheet:
    title: str
    copies: int = 1
    wait_s: float = 0.0
    colour: Colour = Colour.RED
    shapes: tuple[Square | Circle, ...] = ()
    pair: tuple[float, float] = (0.0, 1.0)
    margins: dict[str, float] = field(default_factory=dict)
    note: str | None = None

    def __post_init__(self) -> None:
        if self.wait_s < 0:
            raise ConfigError.of("wait_s", self.wait_s, "must not be negative")


def complaint(table: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        decode(Sheet, table)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_full_table_becomes_the_dataclass() -> None:
    text = """
    title = "plan"
    wait_s = 3
    colour = "blue"
    pair = [1, 2.5]
    margins = { left = 1 }
    [[shapes]]
    kind = "circle"
    radius_gb = 2.0
    """
    expected = Sheet("plan", 1, 3.0, Colour.BLUE, (Circle(2.0),), (1.0, 2.5), {"left": 1.0}, None)
    assert decode(Sheet, tomllib.loads(text)) == expected


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, ["title: missing", 'write title = "..."']),
        ({"title": "a", "copys": 2}, ["copys: unknown key", "did you mean copies?"]),
        ({"title": "a", "wait_min": 2}, ["wait_min", "write wait_s, in seconds"]),
        ({"title": "a", "wait": 2}, ["wait: unknown key", "write wait_s, in seconds"]),
        ({"title": "a", "wait_s": "5min"}, ["wait_s: '5min'", "a number of seconds"]),
        ({"title": "a", "wait_s": -1}, ["wait_s: -1", "must not be negative"]),
        ({"title": "a", "wait_s": float("nan")}, ["wait_s: nan", "finite"]),
        ({"title": "a", "copies": 1.5}, ["copies: 1.5", "a whole number"]),
        ({"title": "a", "copies": True}, ["copies: True", "a whole number"]),
        ({"title": 3}, ["title: 3", 'must be text, written "..."']),
        ({"title": "a", "colour": "bleu"}, ["colour: 'bleu'", "did you mean 'blue'?"]),
        ({"title": "a", "colour": "green"}, ["colour: 'green'", "one of red, blue"]),
        ({"title": "a", "pair": [1]}, ["pair: [1]", "2 members"]),
        ({"title": "a", "pair": 1}, ["pair: 1", "must be a list"]),
        ({"title": "a", "shapes": [{"side_s": 1}]}, ["shapes[0].kind: missing", "'square'"]),
        (
            {"title": "a", "shapes": [{"kind": "star"}]},
            ["shapes[0].kind: 'star'", "one of square, circle"],
        ),
        ({"title": "a", "shapes": [{"kind": "square"}]}, ["shapes[0].side_s: missing"]),
        ({"title": "a", "margins": {"left": "x"}}, ["margins.left: 'x'"]),
    ],
)
def test_what_is_wrong_is_named_with_its_value_and_fix(
    table: dict[str, Any], words: list[str]
) -> None:
    message = complaint(table)
    for word in words:
        assert word in message


def test_an_override_reaches_into_tables_and_lists_and_leaves_the_original_alone() -> None:
    table = {"title": "a", "shapes": [{"kind": "square", "side_s": 1.0}]}
    changed = override(table, ["shapes.0.side_s=7", "margins.left=2", "title=b c"])
    sheet = decode(Sheet, changed)
    assert sheet.shapes == (Square(7.0),)
    assert sheet.margins == {"left": 2.0}
    assert sheet.title == "b c"
    assert table["title"] == "a"


@pytest.mark.parametrize("assignment", ["title", "=3", "a..b=1", "shapes.4.side_s=1", "title.x=1"])
def test_an_override_that_names_no_place_is_refused(assignment: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        override({"title": "a", "shapes": [{}]}, [assignment])


keys = st.text(min_size=1, max_size=8)
scalars = (
    st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=8)
)
tables = st.recursive(
    st.dictionaries(keys, scalars | st.lists(scalars, max_size=3), max_size=4),
    lambda inner: st.dictionaries(
        keys, inner | st.lists(inner, min_size=1, max_size=3), max_size=3
    ),
    max_leaves=8,
)


@given(tables)
def test_what_is_written_as_toml_reads_back_the_same(table: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text(table)) == table


def test_a_decoded_configuration_survives_being_printed_and_read_again() -> None:
    sheet = Sheet(
        "x", 2, 1.5, Colour.BLUE, (Square(1.0), Circle(2.0)), (0.0, 2.0), {"a": 1.0}, None
    )
    assert decode(Sheet, tomllib.loads(toml_text(plain(sheet)))) == sheet
