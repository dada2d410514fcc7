"""Public traces are read as they are published; a bad row is named by its line."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from slackwater.model.errors import ConfigError
from slackwater.sim.inputs.traces import (
    LengthDistribution,
    TracedJob,
    read_jobs_trace,
    read_lengths,
)


def mean_of(lengths: LengthDistribution) -> float:
    """The area under the quantile function."""
    return float(np.trapezoid(lengths.tokens, lengths.shares))


def write(path: Path, text: str) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["philly.csv", "philly.csv.gz"])
def test_jobs_come_in_order_of_arrival_counted_from_the_first(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "arrival_s,duration_s,gpus\n700,50,8\n100,60,16\n\n")
    assert read_jobs_trace(path) == (TracedJob(0, 60, 16), TracedJob(600, 50, 8))
    assert read_jobs_trace(path, limit=1) == (TracedJob(0, 60, 16),)


def test_other_columns_are_passed_over_and_jobs_cut_off_by_the_end_left_out(
    tmp_path: Path,
) -> None:
    text = (
        "arrival_s,duration_s,gpus,gpu_milli,qos,queue_s,censored\n"
        "5,60,1,460,LS,2,0\n"
        "6,70,1,1000,BE,0,1\n"
    )
    assert read_jobs_trace(write(tmp_path / "pods.csv", text)) == (TracedJob(0, 60, 1),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("arrival_s,gpus\n1,2\n", ["line 1", "duration_s", "missing column"]),
        ("arrival_s,duration_s\n1,2\n3,soon\n", ["line 3", "duration_s", "'soon'", "a number"]),
        ("arrival_s,duration_s\n1,-2\n", ["line 2", "duration_s", "-2", "above 0"]),
        ("arrival_s,duration_s\n-1,2\n", ["line 2", "arrival_s", "not be negative"]),
        ("arrival_s,duration_s\n1,2,3\n", ["line 2", "3 cells", "must be 2"]),
        ("arrival_s,duration_s\n1,\n", ["line 2", "duration_s", "missing"]),
        ("arrival_s,duration_s\n1,nan\n", ["line 2", "finite"]),
        ("arrival_s,duration_s,gpus\n1,2,1.5\n", ["line 2", "gpus", "a whole number"]),
        ("arrival_s,duration_s\n", ["at least one"]),
    ],
)
def test_a_bad_row_is_named_by_line_column_value_and_fix(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_jobs_trace(write(tmp_path / "jobs.csv", text))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"not gzip at all", gzip.compress(b"a,b\n1,2\n" * 99)[:40]],
    ids=["not gzip", "cut off"],  # the archive itself has the time in it
)
def test_a_broken_archive_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "jobs.csv.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"jobs\.csv\.gz line"):
        read_jobs_trace(path)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_jobs_trace(tmp_path / "none.csv")


def test_lengths_of_a_request_file_keep_its_mean_and_longest(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    tokens = np.ceil(rng.lognormal(6, 1, 5000))
    lines = "".join(f"{i},10,{int(n)}\n" for i, n in enumerate(tokens))
    lengths = read_lengths(
        write(tmp_path / "r.csv.gz", f"t_s,prompt_tokens,output_tokens\n{lines}")
    )
    assert lengths.limit_tokens == tokens.max()
    assert mean_of(lengths) == pytest.approx(tokens.mean(), rel=0.02)


def test_a_quantile_table_is_the_mixture_of_its_rows_by_requests(tmp_path: Path) -> None:
    text = (
        "client,t_s,field,requests,mean,p1,p50,p100\n"
        "0,0,input_tokens,9,1,1,1,1\n"
        "0,0,output_tokens,300,100,100,100,100\n"
        "1,0,output_tokens,100,500,500,500,500\n"
    )
    lengths = read_lengths(write(tmp_path / "q.csv", text))
    assert mean_of(lengths) == pytest.approx(200, rel=0.01)
    assert np.interp([0.5, 0.74, 0.76, 1.0], lengths.shares, lengths.tokens).tolist() == [
        100,
        100,
        500,
        500,
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("t_s,words\n0,5\n", ["must have a column output_tokens"]),
        ("t_s,output_tokens\n0,-5\n", ["line 2", "output_tokens", "'-5'"]),
        ("field,requests,p50,p100\noutput_tokens,3,9,5\n", ["line 2", "never fall"]),
        ("field,requests,p50,p100\ninput_tokens,3,5,9\n", ["at least one row of output_tokens"]),
    ],
)
def test_bad_lengths_are_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_lengths(write(tmp_path / "lengths.csv", text))
    for word in words:
        assert word in str(caught.value)


def test_drawn_lengths_follow_the_quantiles() -> None:
    lengths = LengthDistribution((0.0, 0.5, 1.0), (0.0, 100.0, 1000.0))
    drawn = lengths.draw(np.random.default_rng(0), 20_000)
    assert drawn.max() <= 1000
    assert (drawn <= 100).mean() == pytest.approx(0.5, abs=0.02)
    assert drawn.mean() == pytest.approx(mean_of(lengths), rel=0.05)
