"""Spot traces: what is read, and what is refused."""

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.model.errors import ConfigError
from slackwater.model.spot_trace import read_spot_trace, spot_events

HEADER = "t_s,event,instance_id"


def test_events_come_in_order_of_time_whatever_the_order_of_lines() -> None:
    events = spot_events([HEADER, "5,remove,a", "0,add,a", "2.5,add,b"])
    assert [(e.t_s, e.event, e.instance_id) for e in events] == [
        (0.0, "add", "a"),
        (2.5, "add", "b"),
        (5.0, "remove", "a"),
    ]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["time,what,id"], "columns"),
        ([HEADER, "x,add,a"], "line 2: t_s: 'x'"),
        ([HEADER, "nan,add,a"], "t_s: nan"),
        ([HEADER, "-1,add,a"], "t_s: -1"),
        ([HEADER, "1,explode,a"], "event: 'explode'"),
        ([HEADER, "1,add,"], "instance_id"),
        ([HEADER, "1,add,a", "2,add,a"], "'a' is added twice"),
        ([HEADER, "1,remove,a"], "'a' is removed before it is added"),
        ([HEADER, "1,add,a", "2,remove,a", "3,add,a"], "'a' is added twice"),
    ],
)
def test_a_wrong_trace_is_refused_with_the_field_and_the_value(lines: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=r".*") as caught:
        spot_events(lines)
    assert said in str(caught.value)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=20))
def test_any_set_of_lives_is_read_back(spans: list[tuple[float, float]]) -> None:
    lines = [HEADER]
    for number, (start, length) in enumerate(spans):
        lines.append(f"{start!r},add,i{number}")
        lines.append(f"{start + length + 1!r},remove,i{number}")
    events = spot_events(lines)
    assert len(events) == 2 * len(spans)
    assert [e.t_s for e in events] == sorted(e.t_s for e in events)


def test_a_compressed_trace_is_read_and_a_broken_one_refused(tmp_path: Path) -> None:
    good = tmp_path / "trace.csv.gz"
    good.write_bytes(gzip.compress(f"{HEADER}\n0,add,a\n".encode()))
    assert len(read_spot_trace(good)) == 1
    broken = tmp_path / "broken.csv.gz"
    broken.write_bytes(good.read_bytes()[:-12])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_spot_trace(broken)
    with pytest.raises(ConfigError, match="is not a file"):
        read_spot_trace(tmp_path / "absent.csv")
