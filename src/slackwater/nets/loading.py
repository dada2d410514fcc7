"""Models from and to Hugging Face directories, or random from a configuration and a seed."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from slackwater.model.errors import ConfigError
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig, weight_files
from slackwater.nets.tensor_parallel import TensorParallel


def load_net(
    source: Path | NetConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> CausalLM:
    """The model of a directory; or, of a configuration, one with random weights from `seed`."""
    net = empty_net(net_config(source), dtype, torch.device(device))
    parameters = net_tensors(net)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    for name, tensor in whole_tensors(source, shapes, seed=seed, dtype=dtype, device=device):
        parameters[name].copy_(tensor)
    return net


def net_config(source: Path | NetConfig) -> NetConfig:
    """The shape of a model directory, or the one given."""
    return source if isinstance(source, NetConfig) else NetConfig.from_directory(source)


def whole_tensors(
    source: Path | NetConfig,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Iterator[tuple[str, Tensor]]:
    """Every whole parameter of a model by its name, one at a time: as stored, or random by `seed`.

    A tensor that is missing, extra or of another shape than in `shapes` is refused.
    """
    if not isinstance(source, NetConfig):
        yield from _check_tensors(source, shapes)
        return
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith(".bias"):
            yield name, tensor.zero_()
        elif "norm" in name:
            yield name, tensor.fill_(1.0)
        else:
            yield name, tensor.normal_(0.0, source.init_std, generator=generator)


def net_tensors(net: CausalLM) -> dict[str, Tensor]:
    """Every parameter by its Hugging Face name; no copies."""
    return {name: parameter.data for name, parameter in net.named_parameters()}


def net_shapes(config: NetConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape by its Hugging Face name; no memory."""
    with torch.device("meta"):
        net = CausalLM(config)
    return {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}


def save_net(net: CausalLM, directory: Path) -> None:
    """Write `config.json` and `model.safetensors` into a folder."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in net_tensors(net).items()}
    write_tensors(tensors, directory / "model.safetensors")
    fields = net.config.to_hf() | {"dtype": str(net.dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file for transformers, with the umask's permissions."""
    path.touch()
    mode = path.stat().st_mode  # safetensors itself creates files of mode 0600
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        if (found := re.search(r"os error (\d+)", str(error))) is None:
            raise
        number = int(found[1])  # such as a full disk
        raise OSError(number, os.strerror(number), str(path)) from None
    path.chmod(mode)


def empty_net(
    config: NetConfig,
    dtype: torch.dtype,
    device: torch.device,
    parallel: TensorParallel | None = None,
) -> CausalLM:
    """A model, or a rank's part of one, with uninitialized weights."""
    net = _allocate(config, dtype, device, parallel)
    net.rotary.fill(device, dtype)
    return net


def empty_like(net: CausalLM) -> CausalLM:
    """Another net of the same shape on the same device; the two share the rotary table."""
    other = _allocate(net.config, net.dtype, net.device, net.parallel)
    other.rotary = net.rotary
    return other


def _allocate(
    config: NetConfig, dtype: torch.dtype, device: torch.device, parallel: TensorParallel | None
) -> CausalLM:
    """A model whose parameters are allocated. `to_empty` does the same, but imports torch's
    compiler, which takes over a second.
    """
    with torch.device("meta"):
        net = CausalLM(config, parallel)
    assert not list(net.buffers()), "buffers would stay on the meta device"
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False):
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            module.register_parameter(name, nn.Parameter(memory))
    return net


def _check_tensors(
    directory: Path, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    missing = set(shapes)
    for name, tensor in _read_tensors(directory):
        if name == "lm_head.weight" and name not in shapes:
            continue
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if name not in shapes:
            raise ConfigError.of(f"tensor in {directory}", name, "is not part of this model")
        if tuple(tensor.shape) != shapes[name]:
            wanted = shapes[name]
            raise ConfigError.of(f"tensor {name}", tuple(tensor.shape), f"must be {wanted}")
        yield name, tensor
        missing.discard(name)
    if missing:
        raise ConfigError.of(f"weights in {directory}", sorted(missing)[:3], "are missing")


def _read_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    for file in weight_files(directory):
        if not file.is_file():
            raise ConfigError.of("model file", str(file), "is missing; safetensors are needed")
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  (not a dict: it cannot be iterated)
                yield name, stored.get_tensor(name)
