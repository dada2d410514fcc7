"""Our one model definition gives transformers' logits, gradients and files."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers  # its models are read when one is first asked for

from harness.packed_attention import PackedCausalAttention
from slackwater.model.errors import ConfigError
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net, save_net

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama with biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama 3 rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
}


def config_of(name: str) -> Any:
    kind, more = CONFIGS[name]
    return getattr(transformers, kind)(**SHAPE | more)


def saved(name: str, directory: Path) -> Any:
    """A transformers model with unit-scale random weights, and its saved directory."""
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(0, 0.15)
    reference.save_pretrained(directory)
    return reference.eval()


def packed(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    tokens = torch.randint(0, 97, (starts[-1],), generator=torch.Generator().manual_seed(1))
    return tokens, torch.cat([torch.arange(n) for n in lengths]), starts


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_packed_batch_gives_the_logits_of_each_sequence_alone(name: str, tmp_path: Path) -> None:
    reference = saved(name, tmp_path / "m")
    net = load_net(tmp_path / "m")
    tokens, positions, starts = packed([7, 40, 7, 1, 33])
    logits = net.logits(net.run_layers(tokens, positions, PackedCausalAttention(starts)))
    for start, stop in pairwise(starts):
        with torch.no_grad():
            expected = reference(tokens[None, start:stop]).logits[0]
        torch.testing.assert_close(logits[start:stop], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_transformers(name: str, recompute: bool, tmp_path: Path) -> None:
    reference = saved(name, tmp_path / "m")
    net = load_net(tmp_path / "m")
    tokens, positions, starts = packed([19])
    hidden = net.run_layers(tokens, positions, PackedCausalAttention(starts), recompute=recompute)
    torch.nn.functional.cross_entropy(net.logits(hidden)[:-1], tokens[1:]).backward()
    logits = reference(tokens[None]).logits[0]
    torch.nn.functional.cross_entropy(logits[:-1], tokens[1:]).backward()
    theirs = dict(reference.named_parameters())
    for parameter_name, parameter in net.named_parameters():
        expected = theirs[parameter_name].grad
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_what_we_save_transformers_loads_bit_for_bit(name: str, tmp_path: Path) -> None:
    reference = saved(name, tmp_path / "theirs")
    save_net(load_net(tmp_path / "theirs"), tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32
    )
    for name_, tensor in reference.state_dict().items():
        assert torch.equal(again.state_dict()[name_], tensor), name_
    tokens = torch.arange(50)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, reference(tokens).logits)


def test_a_wrong_directory_says_which_tensor_is_wrong(tmp_path: Path) -> None:
    save_net(load_net(NetConfig()), tmp_path / "m")
    bigger = NetConfig(num_layers=3)
    save_net(load_net(bigger), tmp_path / "other")
    (tmp_path / "m" / "config.json").write_text((tmp_path / "other" / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"model\.layers\.2.*missing"):
        load_net(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_net(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_by_field(
    change: dict[str, Any], field: str
) -> None:
    raw = config_of("llama").to_dict() | change
    with pytest.raises(ConfigError, match=field):
        NetConfig.from_hf(raw)
