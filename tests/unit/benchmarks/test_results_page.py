"""The page of results puts papers' figures beside ours and says plainly what was met, missed or not
measured.
"""

import json
from pathlib import Path

import pytest

from benchmarks.coscheduling.results import measured_before
from benchmarks.coscheduling.results_page import Measured, MuxResult, results_page
from slackwater.model.errors import ConfigError


def page(**figures: dict[str, float]) -> str:
    machine = {"arch": "none", "cores": 1}
    benches = {
        name: Measured(given, "abc", machine, f"slackwater bench {name} --json")
        for name, given in figures.items()
    }
    return results_page(benches, [])


def line(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {start}"))


def summary(text: str, question: str) -> str:
    """The row of the first table that has this question, without its link."""
    rows = (line for line in text.splitlines() if f") | {question} |" in line)
    return next(rows).partition(") ")[2]


def test_rows_with_a_bar_come_first_and_say_whether_it_is_met() -> None:
    text = page(optimum={"group.cost_ratio_mean": 1.0512, "ours.cost_ratio_mean": 1.021})
    assert summary(text, "cost over the optimum, `group`") == (
        "| cost over the optimum, `group` | 1.06 | 1.051 | <= 1.06 | met |"
    )
    assert summary(text, "cost over the optimum, `interleaving`").endswith(
        "| 1.021 | <= 1.02 | **missed** |"
    )
    assert "[optimum](#against-the-exact-optimum-weave-65-figure-20)" in text
    assert "Command: `slackwater bench optimum --json` (commit abc; none, 1 cores)." in text


def test_the_page_opens_with_what_is_missed() -> None:
    text = page(optimum={"group.cost_ratio_mean": 1.0512, "ours.cost_ratio_mean": 1.021})
    opening = " ".join(text.partition("## ")[0].split())
    assert "1 of 2 bars are met; missed are optimum (cost over the optimum, `interleaving`)." in (
        opening
    )


def test_policies_stand_side_by_side_with_the_papers() -> None:
    text = page(optimum={"group.cost_ratio_mean": 1.0512, "ours.cost_ratio_mean": 1.021})
    section = text[text.index("## Against the exact optimum") :]
    assert line(section, "| `interleaving`").startswith("| | `interleaving` | `group` |")
    row = line(section, "cost over the optimum")
    assert row.startswith("| cost over the optimum | 1.021 | 1.051 | not measured |")
    assert row.endswith("| `group` 1.06, `random` 1.97, `most_idle` 1.66 |")


def test_what_was_not_measured_is_said_and_not_passed_over() -> None:
    text = page(optimum={"group.cost_ratio_mean": 1.05})
    assert "| not measured |" in summary(text, "cost over the optimum, `interleaving`")
    assert "Not measured; run `slackwater bench drain --json`." in text


@pytest.mark.parametrize(("ours", "word"), [(0.41, "met"), (0.51, "**missed**")])
def test_a_bar_can_be_another_figure(ours: float, word: str) -> None:
    text = page(drain={"spread_backfill_over_isolated": 0.5, "ours_over_isolated": ours})
    assert summary(text, "`interleaving` over `isolated`").endswith(f"| <= 0.5 | {word} |")


@pytest.mark.parametrize(
    ("ratio", "peer", "slo", "word"),
    [
        (1.0, 1.0, 1.0, "met"),
        (1.001, 0.9, 1.0, "missed"),
        (0.9, 1.001, 1.0, "missed"),
        (0.9, 0.9, 0.99, "missed"),
    ],
)
def test_every_cell_of_a_sweep_has_its_own_verdict(
    ratio: float, peer: float, slo: float, word: str
) -> None:
    cell = {
        "slo_1_2.ours_over_group": ratio,
        "slo_1_2.ours_over_regrouping_keeping": peer,
        "slo_1_2.ours.slo_attainment": slo,
        "slo_1_2.group.slo_attainment": 1.0,
        **{f"slo_1_2.{policy}.iterations_in_bound": 0.9 for policy in ("ours", "group")},
        **{f"slo_1_2.{policy}.mean_slowdown": 1.1 for policy in ("ours", "group")},
    }
    text = page(philly=cell)
    assert word in line(text, "SLO 1.2 for all")
    assert word in summary(text, "cells that meet their bars")


def test_micro_benchmarks_show_work_per_dollar() -> None:
    mux = MuxResult("m", "two jobs", "1.82x", {"group": 1.9}, {"group": 1.05}, {"group": 1.0})
    assert "| `m`: two jobs | 1.82x | 1.90x (1.05x, 100%) |" in results_page({}, [mux])


def test_several_seeds_show_their_spread_and_meet_a_bar_only_if_all_do(tmp_path: Path) -> None:
    for seed, ratio in enumerate((0.65, 0.69, 0.72)):
        figures = {"ours_over_group_mean": ratio, "ours.slo_attainment": 1.0}
        printed = {"name": "cluster", "commit": "c", "machine": {"arch": "x"}, "figures": figures}
        (tmp_path / f"cluster.seed{seed}.json").write_text(json.dumps(printed))
    text = results_page(measured_before(tmp_path), [])
    assert summary(text, "cost over `group`").endswith(
        "| 0.687 (0.650 to 0.720) | <= 0.7 | **missed** |"
    )
    assert summary(text, "SLO kept, `interleaving`").endswith("| 1.000 | >= 1 | met |")
    assert "`slackwater bench cluster --json --seed N` (seeds 0, 1, 2; commit c; x)" in text


def test_figures_are_read_from_what_the_benches_printed(tmp_path: Path) -> None:
    printed = {"name": "drain", "commit": "c", "machine": {"arch": "x"}, "figures": {"a": 1.0}}
    (tmp_path / "drain.json").write_text(json.dumps(printed))
    found = measured_before(tmp_path)
    assert found["drain"].figures == {"a": 1.0}
    assert found["drain"].command == "slackwater bench drain --json"
    (tmp_path / "drift.quick.json").write_text(json.dumps(printed))
    assert measured_before(tmp_path)["drift"].command == "slackwater bench drift --json --quick"
    (tmp_path / "sim.json").write_text('{"name": "sim"}')
    with pytest.raises(ConfigError, match=r"sim\.json: is not what"):
        measured_before(tmp_path)


def test_a_folder_without_figures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--from"):
        measured_before(tmp_path)
