"""Gathers the figures behind `docs/results/coscheduling.md`: from files that `slackwater bench`
wrote, or by running the benches.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.coscheduling.results_page import Measured, MuxResult, results_page
from benchmarks.coscheduling.results_sections import SECTIONS
from benchmarks.machine import commit, machine
from benchmarks.options import BenchOptions
from slackwater.cli.scenario_source import read_source, under_policies
from slackwater.model.errors import ConfigError
from slackwater.sim.cluster.simulate import simulate
from slackwater.sim.cluster.summary import cost_baseline, mean_slowdown, ratio

Progress = Callable[[float], None]

_MUXES = {"temporal_mux": "1.82x", "train_mux": "1.90x", "spatial_mux": "1.99x"}
_MUX_POLICIES = "interleaving,group,gavel,solo,colocated"


def current_page(
    figures: Path | None, quick: bool, seed: int, data: Path | None, progress: Progress
) -> str:
    """The page, from files of `figures` or from benches that run now."""
    if figures:
        benches = measured_before(figures, seed, data)
    else:
        benches = measure_now(quick, seed, data, progress)
    return results_page(benches, mux_results(progress))


def measured_before(folder: Path, seed: int = 0, data: Path | None = None) -> dict[str, Measured]:
    """One file per bench, holding what `slackwater bench NAME --json` printed: `NAME.json`, or
    `NAME.quick.json` of a quick run; or a file for each of several seeds, `NAME.seed0.json` and so
    on.
    """
    if not folder.is_dir():
        raise ConfigError.of("--from", str(folder), "must be a folder of NAME.json files")
    found = {}
    for section in SECTIONS:
        for suffix, quick in ((".json", False), (".quick.json", True)):
            path = folder / f"{section.bench}{suffix}"
            if path.is_file() and section.bench not in found:
                found[section.bench] = _read(path, _command(section.bench, quick, seed, data))
        seeds = {
            int(path.suffixes[0].removeprefix(".seed")): path
            for path in folder.glob(f"{section.bench}.seed*.json")
        }
        if seeds:
            found[section.bench] = _of_seeds(section.bench, seeds, data)
    if not found:
        names = ", ".join(f"{section.bench}.json" for section in SECTIONS)
        raise ConfigError.of("--from", str(folder), f"must hold at least one of {names}")
    return found


def measure_now(
    quick: bool, seed: int, data: Path | None, progress: Progress
) -> dict[str, Measured]:
    """Run every bench of the page, one after the other."""
    found = {}
    for number, section in enumerate(SECTIONS):

        def moved(what: str, share: float, done: int = number) -> None:
            del what
            progress((done + share) / len(SECTIONS))

        options = BenchOptions(seed=seed, quick=quick, data=data, progress=moved)
        module = f"benchmarks.coscheduling.{section.bench}"
        figures = importlib.import_module(module).run(options)
        command = _command(section.bench, quick, seed, data)
        found[section.bench] = Measured(figures, commit(), machine(), command)
    return found


def mux_results(progress: Progress) -> list[MuxResult]:
    """The three micro-benchmarks under every policy that WEAVE compares."""
    results = []
    for number, (name, paper) in enumerate(_MUXES.items()):
        written, scenario = read_source(name, None, None, None)
        reports = [simulate(one) for one in under_policies(scenario, written, _MUX_POLICIES)]
        solo = cost_baseline(reports)
        results.append(
            MuxResult(
                name,
                written.description,
                f"{paper} (WEAVE)",
                {report.policy: ratio(solo, report) or 0.0 for report in reports},
                {report.policy: mean_slowdown(report) or 0.0 for report in reports},
                {report.policy: report.slo_attainment for report in reports},
            )
        )
        progress((number + 1) / len(_MUXES))
    return results


def _command(bench: str, quick: bool, seed: int, data: Path | None) -> str:
    words = ["slackwater bench", bench, "--json"]
    words += ["--quick"] if quick else []
    words += [f"--seed {seed}"] if seed else []
    words += ["--data DATA"] if data and bench == "philly" else []
    return " ".join(words)


def _of_seeds(bench: str, seeds: Mapping[int, Path], data: Path | None) -> Measured:
    """Means over all seeds, with their spread."""
    command = _command(bench, False, 0, data) + " --seed N"
    every = [_read(seeds[seed], command) for seed in sorted(seeds)]
    values = {
        key: [float(one.figures[key]) for one in every]
        for key in every[0].figures
        if all(key in one.figures for one in every)
    }
    named = ", ".join(str(seed) for seed in sorted(seeds))
    return Measured(
        {key: sum(found) / len(found) for key, found in values.items()},
        every[0].commit,
        every[0].machine,
        command if len(every) > 1 else every[0].command,
        {key: (min(found), max(found)) for key, found in values.items()},
        named,
    )


def _read(path: Path, command: str) -> Measured:
    try:
        printed = json.loads(path.read_text(encoding="utf-8"))
        return Measured(printed["figures"], printed["commit"], printed["machine"], command)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path.name}: is not what `slackwater bench {path.stem} --json` prints: {error}"
        ) from None
