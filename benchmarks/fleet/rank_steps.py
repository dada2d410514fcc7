"""The part `steps` of bench ranks: what two and four ranks learn against what one learns.

Every layout trains all parameters and an adapter, saves half way and at the end, and goes on from
half way once more, which must give the same bits.
"""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.options import BenchOptions
from harness.rank_processes import rank_processes
from harness.rank_training import KINDS, create, largest_difference, run_steps, tensors_of

_DEPLOYMENTS = (("dp=2", "tp=2"), ("dp=4", "tp=4", "tp=2,dp=2"))


def compare_steps(options: BenchOptions) -> dict[str, Any]:
    """`<layout>.<kind>`: the largest difference of a weight or moment from those of one rank;
    `repeats_differ`: how many repeats were not the same to the bit.
    """
    steps = 4 if options.quick else 20
    found: dict[str, Any] = {"steps": steps, "difference_max": 0.0, "repeats_differ": 0}
    with tempfile.TemporaryDirectory(prefix="slackwater-ranks-") as made:
        folder = Path(made)
        for kind in KINDS:
            trainer = create(kind)
            list(run_steps(trainer, range(steps)))
            trainer.save(folder / "one" / kind)
        for layouts in _DEPLOYMENTS:
            options.progress(f"{steps} steps of {', '.join(layouts)}", 0.0)
            arguments = {"layouts": layouts, "steps": steps, "folder": made}
            train = "harness.rank_training:train"
            with rank_processes(layouts[0], train, arguments, folder) as ranks:
                assert not any(ranks.wait()), (folder / "rank0.log").read_text()[-2000:]
            for layout, kind in ((layout, kind) for layout in layouts for kind in KINDS):
                end = tensors_of(folder / layout / kind / "end")
                apart = largest_difference(tensors_of(folder / "one" / kind), end)
                again = tensors_of(folder / layout / kind / "again")
                found[f"{layout}.{kind}"] = apart
                found["difference_max"] = max(found["difference_max"], apart)
                found["repeats_differ"] += largest_difference(end, again) != 0.0
            options.partial(", ".join(layouts), found)
    return found
