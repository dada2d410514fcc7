"""`slackwater bench slo_clock`: a member with SLO 1.5 beside an unprofiled supervised job, an
unprofiled sampler and a job that takes five times what it declared, timed by a clock outside of the
service.

A real service with two virtual nodes, once per shape of the member's iterations. `slowdown` is the
clock's; `api_gap` is how far the API's was from it at worst, beyond what the time of HTTP messages
explains (`api_raw_gap`: with it).
"""

import tempfile
from pathlib import Path

from benchmarks.options import BenchOptions
from harness.slo_clock import SLO, PhaseLengths, run_beside_strangers
from slackwater.cli.demo import two_nodes
from slackwater.cli.own_service import own_service
from slackwater.zoo.tiny import make_model

_SHAPES = {
    "rollout_heavy": PhaseLengths(0.8, 0.4, 0.2),
    "train_heavy": PhaseLengths(0.5, 0.8, 0.1),
    "short": PhaseLengths(0.3, 0.2),
}


def run(options: BenchOptions) -> dict[str, object]:
    """Every shape, in a service of its own; a quick run has fewer iterations."""
    figures: dict[str, object] = {"slo": SLO}
    iterations = 6 if options.quick else 30
    for number, (name, lengths) in enumerate(_SHAPES.items()):
        options.progress(name, number / len(_SHAPES))
        with tempfile.TemporaryDirectory(prefix="slackwater-clock-") as made:
            folder = Path(made)
            make_model("tiny", folder / "model", options.seed)
            (folder / "fleet.toml").write_text(two_nodes())
            with own_service(
                *(folder / "state", "tiny", folder / "model"),
                *(
                    "--fleet",
                    str(folder / "fleet.toml"),
                    "--set",
                    "coschedule.placement=interleaving",
                ),
            ) as (url, key):
                found = run_beside_strangers(url, key, "tiny", iterations, lengths)
        figures |= {
            f"{name}.slowdown": round(found.slowdown, 4),
            f"{name}.api_gap": round(found.widest_gap, 4),
            f"{name}.api_raw_gap": round(found.widest_raw_gap, 4),
            f"{name}.samples": found.samples,
            f"{name}.stages": found.stages,
        }
    return figures
