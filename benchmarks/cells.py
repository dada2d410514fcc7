"""Runs the independent cells of a benchmark in processes and reports each one as it ends."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from benchmarks.options import BenchOptions

Cell = TypeVar("Cell")
Figures = dict[str, float]


def run_cells(
    options: BenchOptions,
    what: str,
    measure: Callable[[Cell], Figures],
    cells: Sequence[Cell],
    processes: int | None = None,
) -> list[Figures]:
    """What `measure` finds for each cell, in the order of `cells`, which should begin with the
    longest. `processes` is how many run at once unless `--processes` says so.
    """
    workers = options.processes or processes or os.cpu_count() or 1
    found: dict[int, Figures] = {}
    options.progress(what, 0.0)
    # A fresh interpreter per worker: forking one that runs the progress bar's thread can hang.
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(cells)), mp_context=fresh) as pool:
        numbers = {pool.submit(measure, cell): number for number, cell in enumerate(cells)}
        try:
            for future in as_completed(numbers):
                number = numbers[future]
                found[number] = future.result()
                options.partial(f"{what}: {cells[number]}", found[number])
                options.progress(what, len(found) / len(cells))
        except BaseException:  # also a signal: cells that have not begun are not waited for
            pool.shutdown(cancel_futures=True)
            raise
    return [found[number] for number in range(len(cells))]
