"""Turns command arguments into scenarios, and scenarios into text and pictures."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slackwater.cli.atomic_file import atomic_file, check_place, write_atomically
from slackwater.model.errors import ConfigError
from slackwater.model.toml_text import toml_text
from slackwater.policy.placement.catalogue import POLICIES, list_options, make_policy
from slackwater.sim.cluster.report import RunReport
from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig
from slackwater.sim.cluster.simulate import scenario_jobs
from slackwater.sim.inputs.scenario_file import ScenarioFile, check_fits, read_scenario

PLOT_FORMATS = ("png", "svg", "pdf")


def read_source(
    source: str, sets: list[str] | None, policy: str | None, seed: int | None
) -> tuple[ScenarioFile, ClusterScenario]:
    """A scenario with the command's changes: as written in the file, and as it runs."""
    assignments = list(sets or [])
    if policy is not None:
        assignments.append(f"policy.name={policy}")
    if seed is not None:
        assignments.append(f"seed={seed}")
    written, folder = read_scenario(source, assignments)
    scenario = written.scenario(folder)
    listed = {spec.job for spec in scenario.jobs}
    for spec in scenario_jobs(scenario):
        if spec.job not in listed:
            check_fits(spec, scenario.view(), "workload")
    if policy is not None:
        scenario = _under_policy(scenario, policy)
    return written, scenario


def check_policy(scenario: ClusterScenario) -> None:
    """Refuse an unknown policy, or an option that it does not have."""
    make_policy(scenario.policy.name, scenario.view(), scenario.policy.options, scenario.seed)


def under_policies(
    scenario: ClusterScenario, written: ScenarioFile, policies: str | None
) -> list[ClusterScenario]:
    """The scenario under every policy to compare."""
    names = [name.strip() for name in policies.split(",")] if policies else list(written.compare)
    names = list(dict.fromkeys(names or [scenario.policy.name, "group", "solo"]))
    result = [_under_policy(scenario, name) for name in names]
    for each in result:
        check_policy(each)
    return result


def _under_policy(scenario: ClusterScenario, name: str) -> ClusterScenario:
    """The scenario under another policy with the options it supports; refuses unknown ones."""
    fleet = scenario.view()
    own = list_options(name, fleet)
    all_options = {option for policy in POLICIES for option in list_options(policy, fleet)}
    for option, value in scenario.policy.options.items():
        if option not in all_options:
            fix = f"is no option of any policy; must be one of: {', '.join(sorted(all_options))}"
            raise ConfigError.of(f"policy.options.{option}", value, fix)
    options = {key: value for key, value in scenario.policy.options.items() if key in own}
    policy: PolicyConfig = dataclasses.replace(scenario.policy, name=name, options=options)
    return dataclasses.replace(scenario, policy=policy)


def settings_text(table: Mapping[str, Any], as_json: bool) -> str:
    """Settings with their defaults; the TOML form can be saved and run."""
    return json.dumps(table) if as_json else toml_text(table).rstrip("\n")


def plot_format(path: Path | None) -> str:
    """The format by the file's ending; checks that the file can be written."""
    if path is None:
        return PLOT_FORMATS[0]
    check_place(path, "--plot")
    fmt = path.suffix.removeprefix(".").lower()
    if fmt not in PLOT_FORMATS:
        raise ConfigError.of("--plot", str(path), "must end in .png, .svg or .pdf")
    return fmt


def hour_window(text: str | None) -> tuple[float, float] | None:
    """`FROM:TO` in hours."""
    if text is None:
        return None
    first, _, last = text.partition(":")
    try:
        window = float(first), float(last)
    except ValueError:
        raise ConfigError.of("--hours", text, "must be written FROM:TO, such as 0:6") from None
    if not 0 <= window[0] < window[1]:
        raise ConfigError.of("--hours", text, "must start at 0 or later and end after its start")
    return window


def write_pictures(
    report: RunReport,
    *,
    plot: Path | None,
    plot_format: str,
    trace: Path | None,
    hours: tuple[float, float] | None = None,
) -> None:
    """Draw the timeline (or some `hours` of it) to `plot`; write a Perfetto trace to `trace`."""
    if trace:
        from slackwater.timeline.perfetto import trace_json

        with atomic_file(trace, "--trace") as part:
            part.writelines(trace_json(report.timeline()))
    if plot:
        from slackwater.timeline.plot import timeline_image

        write_atomically(plot, timeline_image(report.timeline(), plot_format, hours), "--plot")
