"""Replaying a trace: which requests come when, and how their answers are judged."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.options import ReplayOptions
from benchmarks.serving.replay import Answer, figures_of
from benchmarks.serving.replay_trace import Cut, prompt_of, read_replay
from slackwater.model.errors import ConfigError
from slackwater.model.serving import ServingSlo

WHOLE = Cut(from_s=0.0, seconds=100.0, most_prompt=4096, most_output=512)


def write(folder: Path, *lines: str) -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rows_of_a_part_come_at_their_moments_and_are_cut_to_the_context(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "t_s,prompt_tokens,output_tokens,client",
        "1,10,3,7",
        "12.5,9000,900,7",
        "11,20,4,8",
        "30,10,3,7",
    )
    found = read_replay(path, Cut(10.0, 10.0, 4096, 512), seed=0)
    assert [(r.at_s, r.prompt_tokens, r.output_tokens) for r in found] == [
        (1.0, 20, 4),
        (2.5, 4096, 512),
    ]


def test_prompts_share_the_blocks_that_both_name_and_nothing_else(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "t_s,prompt_tokens,output_tokens,hash_ids",
        "0,1100,5,1 2 3",
        "1,1600,5,1 2 4 5",
    )
    one, two = (
        prompt_of(request, number, seed=3)
        for number, request in enumerate(read_replay(path, WHOLE, seed=3))
    )
    assert (len(one), len(two)) == (1100, 1600)
    assert one[:1024] == two[:1024]
    assert one[1024:] != two[1024:1100]


@pytest.mark.parametrize(
    ("header", "rate", "about"),
    [("t_s,m_large_req_per_s,m_mid_req_per_s", "5,100", 5.0), ("t_s,tokens_per_s", "9500", 5.0)],
)
def test_rates_are_drawn_as_requests_by_the_seed(
    tmp_path: Path, header: str, rate: str, about: float
) -> None:
    path = write(tmp_path, header, f"0,{rate}", f"50,{rate.replace('5', '0').replace('9', '0')}")
    found = read_replay(path, WHOLE, seed=1)
    assert found == read_replay(path, WHOLE, seed=1)
    assert found != read_replay(path, WHOLE, seed=2)
    assert len(found) / 50.0 == pytest.approx(about, rel=0.3)
    assert all(0 <= request.at_s < 50.0 for request in found)


def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "client,t_s,field,requests", "0,0,input_tokens,43")
    with pytest.raises(ConfigError, match="must have the columns t_s and prompt_tokens"):
        read_replay(path, WHOLE, seed=0)


def test_a_part_without_requests_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "t_s,prompt_tokens,output_tokens", "1,10,3")
    with pytest.raises(ConfigError, match="between second 50 and 60"):
        read_replay(path, Cut(50.0, 10.0, 4096, 512), seed=0)


def test_a_replay_that_sends_nothing_is_refused() -> None:
    whole = ReplayOptions("http://x", "k", Path("t"), ServingSlo(1, 1))
    with pytest.raises(ConfigError, match="--speed"):
        replace(whole, speed=0.0)
    with pytest.raises(ConfigError, match="--duration"):
        replace(whole, duration_s=0.0)
    with pytest.raises(ConfigError, match="--most-prompt"):
        replace(whole, most_prompt=0)


def test_answers_are_judged_by_the_promise_and_by_the_minute_of_their_sending() -> None:
    answers = [
        Answer(0.0, 0.0, first_s=0.2, end_s=1.2, tokens=11),
        Answer(10.0, 0.01, first_s=10.9, end_s=11.0, tokens=2),
        Answer(61.0, 0.0, first_s=61.1, end_s=61.1, tokens=1),
        Answer(62.0, 0.0, error="500 broken"),
    ]
    asked = ReplayOptions("http://x", "k", Path("t"), ServingSlo(0.5, 0.15))
    figures = figures_of(answers, asked)
    assert (figures["requests"], figures["failed"]) == (4, 1)
    assert figures["attainment"] == 0.5
    assert figures["attainment_by_minute"] == [0.5, 0.5]
    assert figures["ttft_p50_ms"] == pytest.approx(200)
    assert figures["first_error"] == "500 broken"
