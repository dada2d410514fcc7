"""A recorded run of 100 jobs on 1,000 devices, as a trace: two jobs take turns in a group."""

import random
from pathlib import Path

from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase
from slackwater.timeline.perfetto import trace_json
from slackwater.timeline.spans import Rental, Span, Timeline

ROLLOUT_DEVICES, TRAIN_DEVICES = 12, 8  # of a group


def write_recording(
    path: Path, *, groups: int = 50, hours: float = 6.0, seed: int = 7, name: str = "agent"
) -> Path:
    """`groups` pairs of jobs: one rolls out while the other trains, with a switch between."""
    draw, end_s = random.Random(seed), 3600 * hours
    spans: list[Span] = []
    for group in range(groups):
        rollout = [NodeId(f"rollout-{group * ROLLOUT_DEVICES + n}") for n in range(ROLLOUT_DEVICES)]
        train = [NodeId(f"train-{group * TRAIN_DEVICES + n}") for n in range(TRAIN_DEVICES)]
        jobs = [JobId(f"team-{group % 7}/{name}-{2 * group + n:03d}") for n in range(2)]
        typical_s, at_s, turn = draw.uniform(90, 420), draw.uniform(0, 1800), 0
        while at_s < end_s:
            length_s = typical_s * draw.uniform(0.7, 1.3)
            for job, nodes, phase in (
                (jobs[turn % 2], rollout, Phase.ROLLOUT),
                (jobs[1 - turn % 2], train, Phase.TRAIN),
            ):
                switch_s = draw.uniform(2, 8)
                busy_s = switch_s + (length_s - switch_s) * draw.uniform(0.55, 1.0)
                for node in nodes:
                    spans.append(Span(node, job, phase, at_s, at_s + switch_s, "switch"))
                    run = (at_s + switch_s, at_s + busy_s)
                    spans.append(Span(node, job, phase, *run, "run"))
            at_s, turn = at_s + length_s, turn + 1
    nodes = sorted({span.node for span in spans})
    rentals = tuple(Rental(node, 0.0, end_s) for node in nodes)
    drawn = Timeline("recorded", "a recorded run", "", end_s, 0.0, tuple(spans), rentals)
    path.write_bytes(b"".join(trace_json(drawn)))
    return path
