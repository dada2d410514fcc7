"""Many seeds of one simulated storm, a process per core; the first seed that fails is named."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import TypeVar

from benchmarks.options import BenchOptions
from slackwater.model.errors import RefusedError

Report = TypeVar("Report")


def _one(storm: Callable[[int, float], Report], hours: float, seed: int) -> Report | str:
    try:
        return storm(seed, hours)
    except AssertionError as error:
        return f"seed {seed}: {error}"


def run_seeds(
    options: BenchOptions,
    storm: Callable[[int, float], Report],
    *,
    seeds: int,
    hours: float,
    again: str,
) -> list[Report]:
    """What `storm(seed, hours)` reports for each seed; `again` is the command that runs one seed
    again.
    """
    reports: list[Report] = []
    one = partial(_one, storm, hours)
    with ProcessPoolExecutor(max_workers=options.processes or os.cpu_count()) as pool:
        futures = [pool.submit(one, seed) for seed in range(options.seed, options.seed + seeds)]
        try:
            for future in as_completed(futures):
                result = future.result()
                if isinstance(result, str):
                    command = f"{again} --hours {hours:g} --seed N"
                    why = f"an invariant did not hold: {result} (run it again: {command})"
                    raise RefusedError(why)
                reports.append(result)
                options.progress("storms", len(reports) / seeds)
        except BaseException:  # also a signal: nobody waits for seeds that have not begun
            held = {"seeds": float(len(reports)), "simulated_hours": len(reports) * hours}
            options.partial("seeds without a violation", held)
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():  # nor for those that have
                process.kill()
            raise
    return reports
