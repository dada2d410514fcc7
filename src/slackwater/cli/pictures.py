"""Writes the picture and the trace of a simulated run."""

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
    """Draw the timeline (or some `hours` of it) to `plot`; write a Perfetto trace to `trace`."""
    from slackwater.cli.atomic_file import atomic_file, write_atomically

    if trace:
        from slackwater.timeline.perfetto import trace_json

        with atomic_file(trace, "--trace") as part:
            part.writelines(trace_json(report.timeline()))
    if plot:
        from slackwater.timeline.plot import timeline_image

        write_atomically(plot, timeline_image(report.timeline(), plot_format, hours), "--plot")
