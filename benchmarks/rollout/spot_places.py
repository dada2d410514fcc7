"""Where the spot bench looks: RLBoost's three segments, windows of other traces that nothing was
chosen on, and the scenario of its Figure 12.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.options import BenchOptions
from slackwater.model.spot_trace import SpotEvent, read_spot_trace
from slackwater.sim.rollout.extra_capacity import SpotRates

SECONDS = 7200.0
SEGMENTS = ("A", "B", "C")
_DRAWN_APART = 100  # seeds of drawn held-out traces
# Means and removal rates of the three 2 h segments of RLBoost Table 5, for runs without trace
# files.
DRAWN_SEGMENTS = {
    "A": SpotRates(6.53, 8 / 6.53 / 2),
    "B": SpotRates(4.58, 9 / 4.58 / 2),
    "C": SpotRates(6.06, 2 / 6.06 / 2),
}


@dataclass(frozen=True, slots=True)
class TraceWindow:
    """Two hours of a trace, from `start_h` on."""

    file: str
    start_h: float


# Picked by file and hour before any rule had been run on them.
HELD_OUT = {
    "bamboo_start": TraceWindow("spot/bamboo_g4dn_2h_full_dev.csv.gz", 0.0),
    "bamboo_8h": TraceWindow("spot/bamboo_g4dn_full_dev.csv.gz", 8.5),
    "aws4_24h": TraceWindow("spot/skypilot_aws_v100_4node_3zone_dev.csv.gz", 24.0),
    "aws4_96h": TraceWindow("spot/skypilot_aws_v100_4node_3zone_dev.csv.gz", 96.0),
    "aws16_60h": TraceWindow("spot/skypilot_aws_v100_16node_3zone_dev.csv.gz", 60.0),
    "aws1_48h": TraceWindow("spot/skypilot_aws_v100_1node_9zone_dev.csv.gz", 48.0),
    "aws1_240h": TraceWindow("spot/skypilot_aws_v100_1node_9zone_dev.csv.gz", 240.0),
    "gcp_4h": TraceWindow("spot/gcp_v100_east1c_first12h_dev.csv.gz", 4.0),
}


def window_of(events: Sequence[SpotEvent], start_s: float, seconds: float) -> tuple[SpotEvent, ...]:
    """The trace from `start_s` on for so long, on its own clock; who is there at its start is added
    at 0.
    """
    there: dict[str, None] = {}
    for event in events:
        if event.t_s < start_s and event.event == "add":
            there[event.instance_id] = None
        elif event.t_s < start_s:
            del there[event.instance_id]
    within = [
        SpotEvent(event.t_s - start_s, event.event, event.instance_id)
        for event in events
        if start_s <= event.t_s < start_s + seconds
    ]
    return (*(SpotEvent(0.0, "add", name) for name in there), *within)


def segment(options: BenchOptions, name: str) -> tuple[SpotEvent, ...]:
    """One of RLBoost's segments, or a trace drawn with its rates."""
    if options.data is None:
        return DRAWN_SEGMENTS[name].draw(options.seed + SEGMENTS.index(name))
    return read_spot_trace(options.data_file(f"spot/rlboost_like_segment_{name}_dev.csv.gz"))


def held_out(options: BenchOptions) -> dict[str, tuple[SpotEvent, ...]]:
    """Traces that no parameter was chosen on: windows of files, or other draws."""
    if options.data is None:
        return {
            f"drawn_{name}": rates.draw(options.seed + _DRAWN_APART + number)
            for number, (name, rates) in enumerate(DRAWN_SEGMENTS.items())
        }
    return {
        name: window_of(read_spot_trace(options.data_file(cut.file)), 3600 * cut.start_h, SECONDS)
        for name, cut in HELD_OUT.items()
    }


@dataclass(frozen=True, slots=True)
class ReturningInstances:
    """RLBoost Figure 12: five of six instances are taken at once, and come back one by one.

    The job has met every number of instances before, each for `settle_s`, so that there is
    something to remember; measured is from the loss on.
    """

    settle_s: float = 3000.0
    return_every_s: float = 1200.0
    most: int = 6

    @property
    def lost_s(self) -> float:
        return self.settle_s * self.most

    @property
    def end_s(self) -> float:
        return self.lost_s + self.return_every_s * self.most

    def trace(self) -> tuple[SpotEvent, ...]:
        later = range(1, self.most)
        events = [SpotEvent(0.0, "add", "stays")]
        events += [SpotEvent(self.settle_s * n, "add", f"first{n}") for n in later]
        events += [SpotEvent(self.lost_s, "remove", f"first{n}") for n in later]
        events += [
            SpotEvent(self.lost_s + self.return_every_s * n, "add", f"second{n}") for n in later
        ]
        return tuple(events)
