"""Shapes of real models, with random weights, for measurements on a GPU."""

import time

import torch

from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig

QWEN3_8B = NetConfig(
    family="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=12288,
    max_positions=40960,
    rope_theta=1e6,
    tied=False,
    qk_norm=True,
)
LLAMA_8B = NetConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=14336,
    max_positions=32768,
    rope_theta=5e5,
    tied=False,
    qk_norm=False,
)
QWEN3_1_7B = NetConfig(
    family="qwen3",
    vocab_size=151936,
    hidden_size=2048,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=6144,
    max_positions=40960,
    rope_theta=1e6,
    tied=True,
    qk_norm=True,
)
SHAPES = {"8b": QWEN3_8B, "1.7b": QWEN3_1_7B}


def read_bandwidth() -> float:
    """Bytes per second that a plain reduction reads from device memory."""
    data = torch.ones(4 << 30, dtype=torch.uint8, device="cuda").view(torch.float32)
    for _ in range(3):
        data.sum()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(10):
        data.sum()
    torch.cuda.synchronize()
    return 10 * (4 << 30) / (time.perf_counter() - begin)


def product_rate() -> float:
    """Floating-point operations per second of a large bfloat16 product of random numbers."""
    one = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    other = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        one @ other
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(10):
        one @ other
    torch.cuda.synchronize()
    return 10 * 2 * 8192**3 / (time.perf_counter() - begin)


def product_weights(config: NetConfig) -> int:
    """Weights that every token is multiplied by."""
    embedding = config.vocab_size * config.hidden_size
    total = sum(p.numel() for p in meta_net(config).parameters())
    return total if config.tied else total - embedding


def roofline_s(config: NetConfig, batch: int, context: float, bandwidth: float) -> float:
    """The time to read, once, every weight that a step uses and the keys and values of its rows."""
    cache = batch * context * config.kv_values_per_token
    return 2 * (product_weights(config) + cache) / bandwidth


def meta_net(config: NetConfig) -> CausalLM:
    with torch.device("meta"):
        return CausalLM(config)
