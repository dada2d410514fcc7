"""The CUDA pass of two ranks that share every layer. Without a GPU its kernels run in Triton's
interpreter; the ranks are threads of this process, of which one computes at a time.
"""

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from slackwater.nets.config import NetConfig
from slackwater.nets.loading import empty_net, load_net, net_shapes, net_tensors
from slackwater.nets.lora import LoraAdapter, LoraSpec
from slackwater.nets.tensor_parallel import TensorParallel
from slackwater.weights.plan.layout import Layout
from slackwater.weights.plan.shard_map import ShardMap

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the kernels are Triton's")

from slackwater.engine.cuda.adapter_rows import (  # noqa: E402
    PROMPT_TILE,
    AdapterRows,
    AdapterSlot,
    tile_columns,
    units_of,
)
from slackwater.engine.cuda.attention import (  # noqa: E402
    BLOCK_TOKENS,
    CudaPagedAttention,
    CudaPagedRows,
    tile_rows,
)
from slackwater.engine.cuda.forward_pass import CudaForwardPass  # noqa: E402

CONFIG = NetConfig(
    family="llama", qkv_bias=True, o_bias=True, mlp_bias=True, vocab_size=101, hidden_size=64,
    num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=96, max_positions=128,
    init_std=0.1, tied=True,
)  # fmt: skip
LORA = LoraSpec(8, seed=2)
LAYOUT = Layout.parse("tp=2")
ROWS = 20
WAIT_S = 240.0


class ThreadRanks:
    """Threads that compute in turns, and meet where ranks add up."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._meeting = threading.Barrier(LAYOUT.tp)
        self._parts: list[Tensor] = [torch.empty(0)] * LAYOUT.tp

    def run(self, compute: Callable[[TensorParallel], Tensor]) -> list[Tensor]:
        found: dict[int, Tensor] = {}

        def rank(number: int) -> None:
            with self._turn:
                try:
                    found[number] = compute(SharedLayers(self, number))
                except BaseException:
                    self._meeting.abort()
                    raise

        threads = [threading.Thread(target=rank, args=(n,)) for n in range(LAYOUT.tp)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        return [found[number] for number in range(LAYOUT.tp)]

    def exchange(self, rank: int, part: Tensor) -> list[Tensor]:
        self._parts[rank] = part.clone()
        self._turn.release()
        try:
            self._meeting.wait(WAIT_S)
            parts = list(self._parts)
            self._meeting.wait(WAIT_S)
        finally:
            self._turn.acquire()
        return parts


class SharedLayers(TensorParallel):
    """One of the threads; a sum is what all of them have, whichever way it is asked for."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        super().__init__(rank, LAYOUT.tp, None)
        self._ranks = ranks

    @override
    def all_reduce(self, x: Tensor) -> None:
        x.copy_(torch.stack(self._ranks.exchange(self.rank, x)).sum(dim=0))

    @override
    def sum(self, x: Tensor) -> Tensor:
        self.all_reduce(x)
        return x

    @override
    def gather_columns(self, x: Tensor, width: int) -> Tensor | None:
        whole = torch.cat(self._ranks.exchange(self.rank, x), dim=1)
        return whole if self.rank == 0 else None


def slices(whole: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    held = ShardMap(shapes, CONFIG.head_dim, LAYOUT).rank(rank)
    return {
        piece.tensor: whole[piece.tensor][
            tuple(map(slice, piece.box.start, piece.box.stop))
        ].contiguous()
        for piece in held.pieces
    }


def drawn(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.empty(shape).normal_(0, 0.1, generator=generator).to(DEVICE)
        for name, shape in shapes.items()
    }


def scores(
    weights: Mapping[str, Tensor], factors: Mapping[str, Tensor], parallel: TensorParallel | None
) -> Tensor:
    """One prompt: half of its rows through the adapter, after the weights were written in place."""
    net = load_net(CONFIG, device=DEVICE, seed=1)
    if parallel is not None:
        rank, whole = parallel.rank, net_tensors(net)
        net = empty_net(CONFIG, torch.float32, torch.device(DEVICE), parallel)
        for name, tensor in slices(whole, rank).items():
            net_tensors(net)[name].copy_(tensor)
        weights, factors = slices(weights, rank), slices(factors, rank)
    net.requires_grad_(False)
    run = CudaForwardPass(net, batch_invariant=False)
    for name, tensor in net_tensors(net).items():
        tensor.copy_(weights[name])
    units = units_of(LORA.rank)
    run.reserve(units)
    run.put(LoraAdapter(LORA, CONFIG, factors, parallel), 0, units)
    shape = net.rank_config
    elements = shape.kv_values_per_token * BLOCK_TOKENS
    places = torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    most = tile_rows(shape.num_heads, shape.num_kv_heads)
    tiles = [(0, first, min(most, ROWS - first), first) for first in range(0, ROWS, most)]
    rows = CudaPagedRows(
        torch.tensor([[1]], dtype=torch.int32, device=DEVICE),
        torch.zeros_like(places),
        places,
        256,
        1,
        torch.tensor(tiles, dtype=torch.int32, device=DEVICE),
    )
    cache = torch.zeros(2 * elements, device=DEVICE)
    attention = CudaPagedAttention(cache, elements, shape.num_kv_heads, rows)
    spans = [(ROWS // 2, ROWS, AdapterSlot(0, units, LORA.scale))]
    columns = torch.from_numpy(tile_columns(ROWS, spans, PROMPT_TILE)).to(DEVICE)
    adapters = AdapterRows(units, columns, columns, fused=False)
    tokens = torch.arange(ROWS, device=DEVICE) * 5 % CONFIG.vocab_size
    return net.gather_logits(run.logits(run.run_layers(tokens, attention, adapters), adapters))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_two_ranks_give_the_scores_of_one(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.CONFIG", replace(CONFIG, tied=tied))
    weights, factors = drawn(net_shapes(CONFIG), 3), drawn(LORA.tensor_shapes(CONFIG), 4)
    alone = scores(weights, factors, None)
    together, part = ThreadRanks().run(lambda parallel: scores(weights, factors, parallel))
    assert part.shape[1] < alone.shape[1] == CONFIG.vocab_size
    tolerance = 2e-3 if DEVICE == "cpu" else 5e-2  # products and dots in tf32 there
    torch.testing.assert_close(together, alone, rtol=tolerance, atol=tolerance)
