"""`slackwater bench links`: the papers' link experiments, simulated with the weight director that
runs live.

Inputs are theirs (models, links, nodes); how many bytes a delta has is measured here, by the codec,
at the share of elements that they report as changed. Encoding and applying cost what this project
measured on one core, so that small deltas do not come for nothing.
"""

import numpy as np

from benchmarks.options import BenchOptions
from benchmarks.weights.delta import bf16_weights, changed
from benchmarks.weights.simulated.sync import LinkScenario, SyncReport, WeightWorld
from slackwater.weights.delta.encode import encode

_GB, _GBIT = 1e9, 1e9 / 8
_ENCODE, _APPLY = 6.6e9, 10e9  # bytes a second: both versions read; a whole or a delta laid out
_STEP_S = 300.0


def run(options: BenchOptions) -> dict[str, object]:
    """Three experiments; every figure is of the last version of a run."""
    share = _delta_share(1 << (20 if options.quick else 24), 0.01, options.seed)
    return {
        "delta_share_of_whole_1pct": share,
        **_cross_cluster(share),
        **_bandwidths(share),
        **_newcomers(),
    }


def _delta_share(elements: int, part: float, seed: int) -> float:
    """A delta's bytes over the whole's, `part` of bf16 elements changed, scattered."""
    rng = np.random.default_rng(seed)
    old = bf16_weights(elements, rng)
    return len(encode(old, changed(old, part, "scattered", rng))) / old.nbytes


def _report(model_gb: float, slow_gbit: float, fast_gbit: float, **fields: object) -> SyncReport:
    return WeightWorld(
        LinkScenario(
            model_gb * _GB,
            slow_gbit * _GBIT,
            fast_gbit * _GBIT,
            apply=_APPLY,
            **fields,  # type: ignore[arg-type]  # fields of the scenario by name
        )
    ).run()


def _cross_cluster(share: float) -> dict[str, object]:
    """WEAVE 5.2: 20 Gb/s between clusters, 400 within; eight engines on one node, and on two with
    tensor parallelism over four.
    """
    found: dict[str, object] = {}
    for name, nodes, engines in (("one_node", 1, 8), ("two_nodes", 2, 2)):
        shape = {"nodes": nodes, "engines_per_node": engines}
        flat = _report(16, 20, 400, flat=True, **shape)
        one = _report(16, 20, 400, **shape)
        delta = {"delta_bytes": share * 16 * _GB, "encode_s": 2 * 16 * _GB / _ENCODE}
        small = _report(16, 20, 400, **delta, **shape)
        found |= {
            f"weave_{name}_flat_s": flat.sync_s,
            f"weave_{name}_one_copy_s": one.sync_s,
            f"weave_{name}_delta_s": small.sync_s,
            f"weave_{name}_one_copy_over_flat": flat.sync_s / one.sync_s,
            f"weave_{name}_delta_over_flat": flat.sync_s / small.sync_s,
        }
    return found


def _bandwidths(share: float) -> dict[str, object]:
    """ROSE 6.3 and F: 8B and 32B over links of 1 to 200 Gb/s, sixteen engines on two nodes, whole
    against delta.
    """
    found: dict[str, object] = {}
    for name, model_gb in (("8b", 16.0), ("32b", 64.0)):
        for gbit in (1, 5, 20, 200):
            shape = {"nodes": 2, "engines_per_node": 8}
            whole = _report(model_gb, gbit, 400, **shape)
            delta = {
                "delta_bytes": share * model_gb * _GB,
                "encode_s": 2 * model_gb * _GB / (16 * _ENCODE),  # each of 16 ranks its own shards
            }
            small = _report(model_gb, gbit, 400, **delta, **shape)
            found |= {
                f"rose_{name}_{gbit}gbit_whole_s": whole.sync_s,
                f"rose_{name}_{gbit}gbit_delta_s": small.sync_s,
                f"rose_{name}_{gbit}gbit_delta_over_whole": whole.sync_s / small.sync_s,
            }
    return found


def _newcomers() -> dict[str, object]:
    """RLBoost 4.3: instances that join in the middle of a step pull at once, instead of waiting for
    the next one.
    """
    joins = (30.0, 90.0, 150.0, 210.0)
    found = _report(28, 50, 50, nodes=2, join_s=joins)
    used = [_STEP_S - joined - took for joined, took in zip(joins, found.newcomer_s, strict=True)]
    return {
        "rlboost_newcomer_ready_s": max(found.newcomer_s),
        "rlboost_newcomers_time_used": sum(used) / sum(_STEP_S - joined for joined in joins),
        "rlboost_newcomers_time_used_if_synchronised": 0.0,
    }
