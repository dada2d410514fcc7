"""Cells of a benchmark run in processes: figures in order, each told as its cell ends."""

from collections.abc import Mapping

import pytest

from benchmarks.cells import run_cells
from benchmarks.coscheduling.placement import PlacementCell, measure
from benchmarks.options import BenchOptions


@pytest.mark.process
def test_figures_come_in_the_order_of_the_cells_and_each_is_told_once() -> None:
    told: dict[str, Mapping[str, float]] = {}

    def partial(cell: str, figures: Mapping[str, float]) -> None:
        assert cell not in told
        told[cell] = figures

    options = BenchOptions(processes=2, partial=partial)
    cells = [PlacementCell("group", jobs, 2, 0) for jobs in (12, 3)]
    found = run_cells(options, "small", measure, cells)
    assert told == {"small: group 12 jobs": found[0], "small: group 3 jobs": found[1]}
    assert all(one["p99_ms"] > 0 for one in found)


@pytest.mark.process
def test_a_cell_that_fails_ends_the_run() -> None:
    cells = [PlacementCell("no such policy", 1, 1, 0)]
    with pytest.raises(Exception, match="no such policy"):
        run_cells(BenchOptions(processes=1), "small", measure, cells)
