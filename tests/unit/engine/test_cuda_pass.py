"""The CUDA pass is the model, with any mix of adapters. Without a GPU its kernels run in Triton's
interpreter.
"""

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from harness.packed_attention import PackedCausalAttention
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net
from slackwater.nets.lora import LoraAdapter, LoraSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the kernels are Triton's")

from slackwater.engine.cuda import forward_pass  # noqa: E402
from slackwater.engine.cuda.adapter_rows import (  # noqa: E402
    PROMPT_TILE,
    AdapterRows,
    AdapterSlot,
    row_columns,
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

QWEN3 = NetConfig(
    family="qwen3", qk_norm=True, vocab_size=300, hidden_size=64, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=32, ffn_size=96, max_positions=256, init_std=0.1, tied=False,
)  # fmt: skip
QWEN2 = NetConfig(
    family="qwen2", qkv_bias=True, vocab_size=130, hidden_size=64, num_layers=2, num_heads=4,
    num_kv_heads=1, head_dim=16, ffn_size=80, max_positions=256, init_std=0.1, tied=True,
)  # fmt: skip
WIDE = NetConfig(  # wide enough for our own products where few rows decode
    family="qwen3", qk_norm=True, vocab_size=64, hidden_size=256, num_layers=1, num_heads=4,
    num_kv_heads=2, head_dim=32, ffn_size=256, max_positions=256, init_std=0.05, tied=False,
)  # fmt: skip
PROMPT, ROWS = 70, 5


def adapter(config: NetConfig, spec: LoraSpec) -> LoraAdapter:
    made = LoraAdapter.create(spec, config, device=DEVICE)
    generator = torch.Generator(device=DEVICE).manual_seed(spec.seed)
    for name, tensor in made.tensors.items():
        if "lora_B" in name:
            tensor.normal_(0, 0.1, generator=generator)
    return made


def expected(net: CausalLM, tokens: torch.Tensor, own: LoraAdapter | None) -> torch.Tensor:
    attention = PackedCausalAttention((0, len(tokens)), DEVICE)
    places = torch.arange(len(tokens), device=DEVICE)
    with torch.no_grad():
        return net.logits(net.run_layers(tokens, places, attention, adapter=own), adapter=own)


class Setup:
    """`ROWS` requests of `PROMPT` tokens each, in blocks of their own, then one more token each."""

    def __init__(self, config: NetConfig, *, invariant: bool = False) -> None:
        self.config = config
        self.plain = load_net(config, device=DEVICE, seed=1)
        self.net = load_net(config, device=DEVICE, seed=1).requires_grad_(False)
        self.run = CudaForwardPass(self.net, batch_invariant=invariant)
        self.elements = config.kv_values_per_token * BLOCK_TOKENS
        self.cache = torch.zeros((1 + 2 * ROWS) * self.elements, device=DEVICE)
        self.tables = torch.arange(1, 1 + 2 * ROWS, dtype=torch.int32, device=DEVICE).view(ROWS, 2)
        rng = np.random.default_rng(0)
        draws = rng.integers(0, config.vocab_size, (ROWS, PROMPT + 1))
        self.tokens = torch.from_numpy(draws).to(DEVICE)

    def attention(self, rows: CudaPagedRows) -> CudaPagedAttention:
        return CudaPagedAttention(self.cache, self.elements, self.config.num_kv_heads, rows)

    def prompts(self, spans: Sequence[tuple[int, int, AdapterSlot]], extent: int) -> torch.Tensor:
        """Every prompt in one pass, the rows of a request after each other."""
        wide = [(start * PROMPT, stop * PROMPT, held) for start, stop, held in spans]
        most = tile_rows(self.config.num_heads, self.config.num_kv_heads)
        tiles = [
            (request, request * PROMPT + first, min(most, PROMPT - first), first)
            for request in range(ROWS)
            for first in range(0, PROMPT, most)
        ]
        rows = CudaPagedRows(
            self.tables,
            torch.arange(ROWS, dtype=torch.int32, device=DEVICE).repeat_interleave(PROMPT),
            torch.arange(PROMPT, dtype=torch.int32, device=DEVICE).repeat(ROWS),
            256,
            1,
            torch.tensor(tiles, dtype=torch.int32, device=DEVICE),
        )
        adapters = None
        if wide:
            columns = tile_columns(ROWS * PROMPT, wide, PROMPT_TILE)
            on_device = torch.from_numpy(columns).to(DEVICE)
            adapters = AdapterRows(extent, on_device, on_device, fused=False)
        tokens = self.tokens[:, :PROMPT].reshape(-1)
        hidden = self.run.run_layers(tokens, self.attention(rows), adapters)
        return self.run.logits(hidden, adapters).view(ROWS, PROMPT, -1)

    def decode(self, spans: Sequence[tuple[int, int, AdapterSlot]], extent: int) -> torch.Tensor:
        """One more token of every request."""
        rows = CudaPagedRows(
            self.tables,
            torch.arange(ROWS, dtype=torch.int32, device=DEVICE),
            torch.full((ROWS,), PROMPT, dtype=torch.int32, device=DEVICE),
            256,
            1,
            None,
        )
        adapters = None
        if spans:
            tiles = torch.from_numpy(tile_columns(ROWS, spans, 16)).to(DEVICE)
            by_row = torch.from_numpy(row_columns(ROWS, spans)).to(DEVICE)
            adapters = AdapterRows(extent, tiles, by_row, fused=True)
        hidden = self.run.run_layers(self.tokens[:, PROMPT], self.attention(rows), adapters)
        return self.run.logits(hidden, adapters)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = 2e-3 if DEVICE == "cpu" else 5e-2  # products and dots in tf32 there
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the kernels that must be asked for (`SLACKWATER_OWN_PRODUCTS=1`)."""
    monkeypatch.setattr(forward_pass, "FEW_ROWS", 32)


@pytest.mark.parametrize("config", [QWEN3, QWEN2, WIDE], ids=["qwen3", "qwen2", "wide"])
def test_the_pass_without_adapters_is_the_model(config: NetConfig) -> None:
    setup = Setup(config)
    prompts, decoded = setup.prompts((), 0), setup.decode((), 0)
    for number in range(ROWS):
        wanted = expected(setup.plain, setup.tokens[number], None)
        close(prompts[number], wanted[:PROMPT])
        close(decoded[number], wanted[PROMPT])


@pytest.mark.parametrize("invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize("config", [QWEN3, QWEN2], ids=["qwen3", "qwen2"])
def test_rows_of_any_adapters_share_a_batch_and_each_gets_its_own(
    config: NetConfig, invariant: bool
) -> None:
    setup = Setup(config, invariant=invariant)
    specs = [LoraSpec(8, seed=1), LoraSpec(24, seed=2), LoraSpec(16, seed=3, mlp=False)]
    owners: list[LoraAdapter | None] = [None] * ROWS
    spans, first = [], 0
    for place, spec in enumerate(specs):
        made = adapter(config, spec)
        units = units_of(spec.rank)
        setup.run.reserve(first + units)  # what is there must stay
        setup.run.put(made, first, units)
        row = place + 1  # row 0 and row 4 are the base's
        spans.append((row, row + 1, AdapterSlot(first, units, spec.scale)))
        owners[row] = made
        first += units
    prompts, decoded = setup.prompts(spans, first), setup.decode(spans, first)
    for number, own in enumerate(owners):
        wanted = expected(setup.plain, setup.tokens[number], own)
        close(prompts[number], wanted[:PROMPT])
        close(decoded[number], wanted[PROMPT])


@pytest.mark.parametrize("config", [QWEN3, WIDE], ids=["qwen3", "wide"])
def test_an_adapter_is_rewritten_in_place(config: NetConfig) -> None:
    setup = Setup(config)
    setup.run.reserve(4)
    spans = [(0, ROWS, AdapterSlot(1, 2, 1.0))]
    for seed in (1, 2):
        spec = LoraSpec(32, seed=seed)
        made = adapter(config, spec)
        setup.run.put(made, 1, 2)
        setup.prompts(spans, 4)
        decoded = setup.decode(spans, 4)
        close(decoded[2], expected(setup.plain, setup.tokens[2], made)[PROMPT])
