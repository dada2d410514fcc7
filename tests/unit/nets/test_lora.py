"""Low-rank adapters: names and arithmetic."""

import pytest
import torch

from harness.packed_attention import PackedCausalAttention
from slackwater.model.errors import ConfigError
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net, net_tensors
from slackwater.nets.lora import LoraAdapter, LoraSpec

CONFIG = NetConfig(init_std=0.15, tied=False)


def trained(spec: LoraSpec, seed: int) -> LoraAdapter:
    """An adapter whose B is not zero any more."""
    adapter = LoraAdapter.create(spec, CONFIG)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in adapter.tensors.items():
        if "lora_B" in name:
            tensor.normal_(0, 0.1, generator=generator)
    return adapter


def merged(adapter: LoraAdapter) -> CausalLM:
    """The reference: the update folded into the weights."""
    net = load_net(CONFIG, seed=1)
    for layer in adapter.spec.shapes(CONFIG):
        pair = adapter.pair(layer)
        assert pair is not None
        net_tensors(net)[f"{layer}.weight"] += adapter.spec.scale * pair[1] @ pair[0]
    return net


def logits(net: CausalLM, adapter: LoraAdapter | None) -> torch.Tensor:
    tokens = torch.arange(20) % 13
    positions = torch.cat([torch.arange(12), torch.arange(8)])
    hidden = net.run_layers(tokens, positions, PackedCausalAttention((0, 12, 20)), adapter=adapter)
    return net.logits(hidden, adapter=adapter)


@pytest.mark.parametrize(
    "spec", [LoraSpec(4), LoraSpec(2, attn=False), LoraSpec(3, mlp=False, unembed=False)]
)
def test_an_adapter_is_the_merged_weights(spec: LoraSpec) -> None:
    net = load_net(CONFIG, seed=1)
    adapter = trained(spec, 5)
    found = logits(net, adapter)
    torch.testing.assert_close(found, logits(merged(adapter), None), rtol=1e-4, atol=1e-4)


def test_a_new_adapter_changes_nothing_and_the_same_seed_gives_the_same() -> None:
    net = load_net(CONFIG, seed=1)
    adapter = LoraAdapter.create(LoraSpec(4, seed=9), CONFIG)
    assert torch.equal(logits(net, adapter), logits(net, None))
    again = LoraAdapter.create(LoraSpec(4, seed=9), CONFIG)
    assert all(torch.equal(again.tensors[name], t) for name, t in adapter.tensors.items())


def test_only_the_adapter_gets_gradients_and_names_are_pefts() -> None:
    net = load_net(CONFIG, seed=1).requires_grad_(False)
    adapter = trained(LoraSpec(4), 5)
    for factor in adapter.tensors.values():
        factor.requires_grad_(True)
    logits(net, adapter).logsumexp(-1).sum().backward()
    assert all(tensor.grad is not None for tensor in adapter.tensors.values())
    assert "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight" in adapter.tensors


def test_tensors_of_another_shape_are_refused_by_name() -> None:
    adapter = LoraAdapter.create(LoraSpec(4), CONFIG)
    with pytest.raises(ConfigError, match=r"q_proj\.lora_A"):
        LoraAdapter(LoraSpec(8), CONFIG, adapter.tensors)
    with pytest.raises(ConfigError, match="rank"):
        LoraSpec(0)
