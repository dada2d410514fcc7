"""Training's CUDA kernels mean what PyTorch's operators do. Without a GPU they run in Triton's
interpreter.
"""

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from trainer_builders import batch

from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net, net_tensors
from slackwater.nets.lora import LoraSpec
from slackwater.nets.ops import AdaptedWeight, HeadNorms, NetOps, Rotation
from slackwater.tensors.checked_file import FOR_TRANSFORMERS, write_tensors
from slackwater.training.shared_attention import SharedPrefixAttention, share_prefixes
from slackwater.training.trainer import Trainer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the kernels are Triton's")

from slackwater.training.cuda import attention  # noqa: E402
from slackwater.training.cuda.logprobs import gathered_logprobs  # noqa: E402
from slackwater.training.cuda.ops import CudaOps  # noqa: E402

Case = Callable[[NetOps, list[Tensor]], tuple[Tensor, ...]]


def random_tensors(*shapes: tuple[int, ...], seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [tensor.to(DEVICE).requires_grad_() for tensor in drawn]


def rotation(rows: int, half: int) -> Rotation:
    angles = (torch.arange(rows * half).view(rows, half) * 0.37).to(DEVICE)
    return Rotation(angles.cos(), angles.sin())


def turned(ops: NetOps, given: list[Tensor]) -> tuple[Tensor, ...]:
    q_norm, k_norm = given[3:] or (None, None)
    norms = HeadNorms(8, q_norm, k_norm, 1e-6)
    return ops.rotate((given[0], given[1], given[2]), rotation(7, 4), norms)


def two_layers(ops: NetOps, given: list[Tensor]) -> tuple[Tensor, ...]:
    x, one, bias, a, b, other = given
    return ops.linears(x, [AdaptedWeight(one, bias, a, b), AdaptedWeight(other, None)], 0.5)


CASES: dict[str, tuple[Case, list[tuple[int, ...]]]] = {
    "norm": (lambda ops, t: (ops.rms_norm(t[0], t[1], 1e-5),), [(5, 24), (24,)]),
    "add and norm": (
        lambda ops, t: ops.add_rms_norm(t[0], t[1], t[2], 1e-5),
        [(5, 24), (5, 24), (24,)],
    ),
    "turn": (turned, [(7, 24), (7, 16), (7, 16)]),
    "norm and turn": (turned, [(7, 24), (7, 16), (7, 16), (8,), (8,)]),
    "gate": (lambda ops, t: (ops.silu_mul(t[0], t[1]),), [(5, 40), (5, 40)]),
    "layers": (two_layers, [(6, 12), (20, 12), (20,), (4, 12), (20, 4), (8, 12)]),
}


def gradients(outputs: tuple[Tensor, ...], given: list[Tensor]) -> list[Tensor]:
    weights = random_tensors(*(tuple(output.shape) for output in outputs), seed=2)
    parts = [(o * w.detach()).sum() for o, w in zip(outputs, weights, strict=True)]
    torch.stack(parts).sum().backward()
    found = [tensor.grad for tensor in given]
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gathered", [False, True])
def test_values_and_gradients_are_those_of_the_plain_operators(name: str, gathered: bool) -> None:
    case, shapes = CASES[name]
    results = []
    for ops in (NetOps(), CudaOps()):
        given = random_tensors(*shapes)
        if gathered:  # a gradient that is there already is added to
            for tensor in given:
                tensor.grad = torch.ones_like(tensor)
        outputs = case(ops, given)
        results.append([*outputs, *gradients(outputs, given)])
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)


def test_layers_that_are_frozen_get_no_gradient_and_pass_one_on() -> None:
    x, weight, a, b = random_tensors((6, 12), (20, 12), (4, 12), (20, 4))
    weight.requires_grad_(False)
    (out,) = CudaOps().linears(x, [AdaptedWeight(weight, None, a, b)], 2.0)
    out.sum().backward()
    assert weight.grad is None
    assert x.grad is not None
    whole = weight + 2.0 * b @ a
    torch.testing.assert_close(x.grad, whole.sum(0).expand(6, -1), rtol=1e-4, atol=1e-4)


def test_logprobs_of_targets_and_their_gradient() -> None:
    rows = torch.tensor([0, 2, 2, 4], device=DEVICE)
    targets = torch.tensor([[1, 3], [5, 5], [700, 0], [9, 10]], device=DEVICE)
    (scores,) = random_tensors((5, 701))
    expected = torch.log_softmax(scores, -1)[rows].gather(1, targets)
    (wanted,) = gradients((expected,), [scores])
    (again,) = random_tensors((5, 701))
    found = gathered_logprobs(again.clone(), rows, targets)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients((found,), [again])[0], wanted)


def plain_forward(
    q: Tensor, k: Tensor, v: Tensor, runs: attention.RowRuns, causal: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """What the flash kernel promises, in fp32 on any device."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    repeat = q.shape[1] // k.shape[1]
    edges = zip(runs.queries.tolist(), runs.keys.tolist(), strict=True)
    starts = list(edges)
    for (q0, k0), (q1, k1) in pairwise(starts):
        keys, values = (x[k0:k1].repeat_interleave(repeat, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], keys) * q.shape[2] ** -0.5
        if causal:
            seen = torch.ones(q1 - q0, k1 - k0, device=q.device).tril().bool()
            scores = scores.masked_fill(~seen, float("-inf"))
        lse[:, q0:q1] = scores.logsumexp(-1)
        out[q0:q1] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out, lse, (lse, lse)


def plain_backward(
    g: Tensor,
    given: tuple[Tensor, ...],
    runs: attention.RowRuns,
    causal: bool,
    kept: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    del kept
    q, k, v, out, lse = given
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5
    starts = list(zip(runs.queries.tolist(), runs.keys.tolist(), strict=True))
    for (q0, k0), (q1, k1) in pairwise(starts):
        keys, values = (x[k0:k1].repeat_interleave(repeat, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], keys) * scale
        weights = (scores - lse[:, q0:q1, None]).exp()
        if causal:
            weights = weights.tril()
        back = torch.einsum("qhd,khd->hqk", g[q0:q1], values)
        mean = (g[q0:q1] * out[q0:q1]).sum(-1).t()[:, :, None]
        dscores = weights * (back - mean) * scale
        dq[q0:q1] = torch.einsum("hqk,khd->qhd", dscores, keys)
        apart = (k1 - k0, k.shape[1], repeat, k.shape[2])
        dk[k0:k1] = torch.einsum("hqk,qhd->khd", dscores, q[q0:q1]).reshape(apart).sum(2)
        dv[k0:k1] = torch.einsum("hqk,qhd->khd", weights, g[q0:q1]).reshape(apart).sum(2)
    return dq, dk, dv


TREES = {
    "strangers": ["abcd", "xyz"],
    "a group": ["abcdpq", "abcdrst", "abcdu", "abcd"],
    "groups": ["abcp", "abcqr", "xyzzp", "xyzzq", "xyzzr"],
    "branches": ["abcdef", "abcdxy", "abcdxz", "abq", "abr", "s"],
    "branches of branches": ["abcdefgh", "abcdefxy", "abcdefxz", "abcdk", "abcdl", "am", "an"],
}


@pytest.mark.parametrize("name", TREES)
def test_attention_over_shared_prefixes_is_that_of_the_whole_sequences(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "flash_forward", plain_forward)
    monkeypatch.setattr(attention, "flash_backward", plain_backward)
    shared = share_prefixes([np.array([ord(c) for c in text]) for text in TREES[name]])
    device = torch.device(DEVICE)
    results = []
    for kind in (SharedPrefixAttention, attention.FlashSharedAttention):
        rows = shared.count
        given = random_tensors((rows, 4, 16), (rows, 2, 16), (rows, 2, 16))
        out = kind(shared, device)(0, *given)
        results.append([out, *gradients((out,), given)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_flash_attention_of_many_samples_has_no_row_that_is_off() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 50_000, 300) for _ in range(4)]
    samples = [np.append(each, rng.integers(0, 50_000, 70)) for each in prompts for _ in range(16)]
    shared, device = share_prefixes(samples), torch.device(DEVICE)
    for seed in range(5):
        shapes = [(shared.count, heads, 128) for heads in (32, 8, 8)]
        given = [tensor.detach().bfloat16() for tensor in random_tensors(*shapes, seed=seed)]
        found = attention.FlashSharedAttention(shared, device)(0, *given)
        expected = SharedPrefixAttention(shared, device)(0, *given)
        assert float((found - expected).abs().max()) < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("rank", [0, 8])
def test_a_pass_on_a_gpu_in_bf16_is_near_the_cpus_in_fp32(rank: int, tmp_path: Path) -> None:
    net = NetConfig(
        family="qwen3", qk_norm=True, vocab_size=300, hidden_size=128, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=32, ffn_size=192, max_positions=256, init_std=0.08,
    )  # fmt: skip
    model = tmp_path / "model"
    write_tensors(model / "model.safetensors", net_tensors(load_net(net)), {}, FOR_TRANSFORMERS)
    (model / "config.json").write_text(json.dumps(net.to_hf()))
    lora = LoraSpec(rank) if rank else None
    here = Trainer.create(model, lora)
    there = Trainer.create(model, lora, dtype="bfloat16", device="cuda")
    for _ in range(2):
        found = [
            each.forward_backward(batch(), "importance_sampling", {}) for each in (here, there)
        ]
    for one, other in zip(*(output.logprobs for output in found), strict=True):
        assert np.abs(one - other).mean() < 0.02
    for name, gradient in here.gradient().items():
        other = there.gradient()[name].cpu()
        if gradient.norm() > 1e-3:
            assert (other - gradient).norm() / gradient.norm() < 0.08, name
