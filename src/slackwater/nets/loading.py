"""Models from and to Hugging Face directories, or random from a configuration and a seed."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from slackwater.model.errors import ConfigError
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig


def load_net(
    source: Path | NetConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> CausalLM:
    """The model of a directory; or, of a configuration, one with random weights from `seed`."""
    if isinstance(source, NetConfig):
        net = empty_net(source, dtype, torch.device(device))
        _initialise(net, seed)
        return net
    net = empty_net(NetConfig.from_directory(source), dtype, torch.device(device))
    _fill(net, source)
    return net


def net_tensors(net: CausalLM) -> dict[str, Tensor]:
    """Every parameter by its Hugging Face name; no copies."""
    return {name: parameter.data for name, parameter in net.named_parameters()}


def save_net(net: CausalLM, directory: Path) -> None:
    """Write `config.json` and `model.safetensors`; the directory appears whole or not at all."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        tensors = {name: tensor.contiguous() for name, tensor in net_tensors(net).items()}
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        fields = net.config.to_hf() | {"dtype": str(net.dtype).removeprefix("torch.")}
        (partial / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        partial.chmod(0o755)
        if directory.exists():
            shutil.rmtree(directory)
        partial.replace(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def empty_net(config: NetConfig, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """A model with memory for its weights, and nothing in it yet."""
    net = _unset(config, dtype, device)
    net.rotary.reserve(config.max_positions, device, dtype)
    return net


def empty_like(net: CausalLM) -> CausalLM:
    """Another of the same shape on the same device; the two share the table of rotary positions."""
    other = _unset(net.config, net.dtype, net.device)
    other.rotary = net.rotary
    return other


def _unset(config: NetConfig, dtype: torch.dtype, device: torch.device) -> CausalLM:
    with torch.device("meta"):
        net = CausalLM(config)
    _materialise(net, dtype, device)
    return net


def _materialise(net: CausalLM, dtype: torch.dtype, device: torch.device) -> None:
    """Give every parameter memory. `to_empty` does the same, but imports torch's compiler for it: 1
    s and more.
    """
    assert not list(net.buffers()), "buffers would stay on the meta device"
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False):
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            module.register_parameter(name, nn.Parameter(memory))


def _initialise(net: CausalLM, seed: int) -> None:
    generator = torch.Generator(device=net.device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, net.config.init_std, generator=generator)


def _fill(net: CausalLM, directory: Path) -> None:
    parameters = dict(net.named_parameters())
    missing = set(parameters)
    for name, tensor in _stored(directory):
        if name == "lm_head.weight" and net.lm_head is None:
            continue
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if name not in parameters:
            raise ConfigError.of(f"tensor in {directory}", name, "is not part of this model")
        if tensor.shape != parameters[name].shape:
            wanted = tuple(parameters[name].shape)
            raise ConfigError.of(f"tensor {name}", tuple(tensor.shape), f"must be {wanted}")
        with torch.no_grad():
            parameters[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise ConfigError.of(f"weights in {directory}", sorted(missing)[:3], "are missing")


def _stored(directory: Path) -> Iterator[tuple[str, Tensor]]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = json.loads(index.read_text())["weight_map"].values()
        files = [directory / name for name in sorted(set(shards))]
    else:
        files = [directory / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise ConfigError.of("model file", str(file), "is missing; safetensors are needed")
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  (not a dict: it cannot be iterated)
                yield name, stored.get_tensor(name)
