"""The part `engine` of bench ranks: one engine as two tensor-parallel ranks on two cores, against
one rank on one core; and turns that move from one such engine to another half way.

The net has the size of SmolLM2-135M with 8 heads and 4 KV heads; that one's 9 and 3 have no half.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.options import BenchOptions
from harness.rank_engine import TURN_TOKENS
from harness.rank_processes import rank_processes
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net, save_net

_NET = NetConfig(
    family="llama",
    vocab_size=49_152,
    hidden_size=576,
    num_layers=30,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    ffn_size=1536,
    max_positions=2048,
)
_QUICK_NET = replace(
    _NET, vocab_size=512, hidden_size=64, num_layers=2, head_dim=8, ffn_size=128, max_positions=256
)


def compare_engines(options: BenchOptions) -> dict[str, Any]:
    """`tp2_over_tp1`: tokens/s of two ranks over those of one; `different`: turns whose tokens are
    not one rank's; `moved_different`: turns that went on in another engine of two ranks, and whose
    tokens or log-probs are not those of the one that they left.
    """
    with tempfile.TemporaryDirectory(prefix="slackwater-ranks-") as made:
        folder = Path(made)
        save_net(load_net(_QUICK_NET if options.quick else _NET, seed=3), folder / "base")
        found: dict[str, dict[str, Any]] = {}
        for name, layout, resumed in (
            ("one", "tp=1", ""),
            ("two", "tp=2", ""),
            ("moved", "tp=2", "two"),
        ):
            options.progress(f"{name}, {layout}", len(found) / 3)
            arguments = {"folder": made, "name": name, "resumed": resumed}
            serve = "harness.rank_engine:time_turns"
            with rank_processes(layout, serve, arguments, folder) as ranks:
                assert not any(ranks.wait()), (folder / "rank0.log").read_text()[-2000:]
            found[name] = json.loads((folder / f"{name}.json").read_text())
    one, two, moved = (found[name]["turns"] for name in ("one", "two", "moved"))
    tokens_per_s = {name: made["tokens"] / made["took_s"] for name, made in found.items()}
    return {
        "turns": len(two),
        "tp1_tokens_per_s": tokens_per_s["one"],
        "tp2_tokens_per_s": tokens_per_s["two"],
        "tp2_over_tp1": tokens_per_s["two"] / tokens_per_s["one"],
        "different": sum(_tokens(one[turn]) != _tokens(two[turn]) for turn in two),
        "moved_different": sum(two[turn][TURN_TOKENS // 2 :] != moved[turn] for turn in two),
    }


def _tokens(turn: list[list[float]]) -> list[int]:
    return [int(token) for token, _ in turn]
