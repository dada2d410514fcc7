"""Versions, masks and files beside a running engine on a GPU. Skipped where there is none."""

import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_cuda import CONFIG, SETTINGS, plain_logprobs, prompt

from slackwater.engine.request import GenerationRequest, Guide
from slackwater.model.errors import ConfigError
from slackwater.model.sampling import Grammar, Sampling
from slackwater.nets.loading import load_net, net_tensors
from slackwater.tensors.checked_file import read_tensors, write_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class _EveryThird:
    """Allows tokens that are multiples of three, and ends after the fifth."""

    def __init__(self) -> None:
        self.stopped, self._made = False, 0
        self.failed: str | None = None

    def allow(self, bits: NDArray[np.int32]) -> None:
        tokens = np.arange(0, CONFIG.vocab_size, 3)
        words = np.zeros(len(bits), np.uint32)
        np.bitwise_or.at(words, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))
        bits[:] = words.view(np.int32)

    def advance(self, token: int) -> None:
        assert token % 3 == 0
        self._made += 1
        self.stopped = self._made == 5


class _Guides:
    def guide(self, grammar: Grammar, generated: Sequence[int], ends: Collection[int]) -> Guide:
        del grammar, generated, ends
        return _EveryThird()


def test_guided_rows_draw_what_is_allowed_and_their_neighbours_are_free() -> None:
    from tiny_engine import run

    from slackwater.engine.config import EngineConfig
    from slackwater.engine.engine import Engine

    net = load_net(CONFIG, dtype=torch.bfloat16, device="cuda")
    engine = Engine(net, EngineConfig(**SETTINGS), guides=_Guides())
    guided = Sampling(max_tokens=40, seed=1, grammar=Grammar("regex", ".*"))
    free = Sampling(max_tokens=40, seed=1)
    wanted = [
        GenerationRequest(n, prompt(n, 50), guided if n % 2 else free, "base") for n in range(8)
    ]
    found = run(engine, *wanted)
    for number in range(8):
        tokens = found.tokens[number]
        if number % 2:
            assert len(tokens) == 5
            assert all(token % 3 == 0 for token in tokens)
        else:
            assert len(tokens) == 40
            assert any(token % 3 for token in tokens)
        ids = [*prompt(number, 50), *tokens]
        picked = torch.tensor(tokens, device="cuda")[:, None]
        expected = plain_logprobs(net, ids)[49:-1].gather(1, picked)[:, 0].cpu().numpy()
        assert np.abs(np.array(found.logprobs[number]) - expected).mean() < 0.03


def test_a_version_that_another_thread_fills_beside_the_steps_is_whole_when_it_is_shown() -> None:
    from tiny_engine import run

    from slackwater.engine.config import EngineConfig
    from slackwater.engine.engine import Engine

    net = load_net(CONFIG, dtype=torch.bfloat16, device="cuda")
    engine = Engine(net, EngineConfig(**SETTINGS, max_full_versions=3))
    others = [load_net(CONFIG, dtype=torch.bfloat16, device="cuda", seed=seed) for seed in (5, 6)]
    for number, other in enumerate(others):
        tensors = {name: tensor.cpu().pin_memory() for name, tensor in net_tensors(other).items()}
        room = engine.versions.begin()
        filling = threading.Thread(target=engine.versions.fill, args=(room, tensors))
        engine.add(
            GenerationRequest(7, prompt(7, 90), Sampling(max_tokens=60, ignore_eos=True), "base")
        )
        filling.start()
        while engine.busy:
            engine.step()
        filling.join(60)
        engine.versions.finish(f"v{number}", room)
        asked = GenerationRequest(1, prompt(1, 90), Sampling(max_tokens=20, seed=3), f"v{number}")
        found = run(engine, asked)
        ids = [*prompt(1, 90), *found.tokens[1]]
        picked = torch.tensor(found.tokens[1], device="cuda")[:, None]
        expected = plain_logprobs(other, ids)[89:-1].gather(1, picked)[:, 0].cpu().numpy()
        assert np.abs(np.array(found.logprobs[1]) - expected).mean() < 0.03


def test_tensors_on_the_device_are_written_with_sums_that_hold(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    tensors = {
        "large": torch.randn(9_000_001, device="cuda"),
        "small": torch.randn(3, 5, device="cuda", dtype=torch.bfloat16),
    }
    tensors |= {f"of many {number}": torch.randn(number, 7, device="cuda") for number in range(40)}
    write_tensors(file, tensors, {}, durable=False)
    found, _ = read_tensors(file, "cuda")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert all(found[name].shape == tensors[name].shape for name in tensors)
    on_host, _ = read_tensors(file)
    assert all(torch.equal(on_host[name], tensors[name].cpu()) for name in tensors)
    held = bytearray(file.read_bytes())
    held[-1] ^= 1
    file.write_bytes(held)
    with pytest.raises(ConfigError, match="not as written"):
        read_tensors(file, "cuda")
