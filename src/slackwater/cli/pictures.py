"""Pictures of a simulated run, written whole or not at all."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slackwater.sim.cluster.report import RunReport


def write_pictures(
    report: "RunReport",
    *,
    plot: Path | None,
    plot_format: str,
    trace: Path | None,
    hours: tuple[float, float] | None = None,
) -> None:
    """The timeline to `plot`, of some `hours` only if asked; a trace for Perfetto to `trace`."""
    from slackwater.cli.atomic_file import atomic_file, write_atomically

    if trace:
        from slackwater.timeline.perfetto import trace_json

        with atomic_file(trace, "--trace") as part:
            part.writelines(trace_json(report.timeline()))
    if plot:
        from slackwater.timeline.plot import timeline_image

        write_atomically(plot, timeline_image(report.timeline(), plot_format, hours), "--plot")
