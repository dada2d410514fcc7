"""Checks before a service starts; they read headers only, no weights and no PyTorch."""

import ctypes
import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slackwater.model.errors import ConfigError, RefusedError, SlackwaterError

if TYPE_CHECKING:
    from slackwater.runtime.settings import ServiceSettings

HOW_TO_ISOLATE = "install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap)"
_LONGEST_HEADER = 100 << 20


def check_device(device: str) -> None:
    """`cpu`, `cuda` or `cuda:N`, and there."""
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise ConfigError.of("--device", device, "must be cpu, cuda or cuda:N")
    if kind == "cuda" and (found := _cuda_devices()) <= int(number or 0):
        raise RefusedError(
            f"--device: {device} is not here ({found} CUDA devices found); write --device cpu"
        )


def _cuda_devices() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def check_isolation(settings: "ServiceSettings", tenants: int) -> None:
    """Require isolated sandboxes for several tenants on this machine; warn a single tenant.

    Nodes of a fleet file are other machines; their sandboxes are checked when they join.
    """
    from slackwater.sandbox.choice import why_no_isolation

    if settings.fleet is not None or not settings.sandboxes:
        return
    why = why_no_isolation(settings.sandbox_backend)
    if why is None:
        return
    if tenants > 1 and not settings.trust_tenants:
        raise RefusedError(
            f"--sandbox-backend: {tenants} tenants need sandboxes that isolate them, and there are "
            f"none here ({why}); {HOW_TO_ISOLATE}, or write --trust-tenants if none means harm"
        )
    print(
        f"WARNING: actions are not isolated ({why}). Whatever they run, also code that a model "
        "wrote, can read and change all that this user can, the service's keys included; "
        f"{HOW_TO_ISOLATE}",
        file=sys.stderr,
    )


def check_models(models: Mapping[str, Path]) -> None:
    """Every model's architecture is one that the engine has, and its weights are whole."""
    from slackwater.nets.config import NetConfig

    for name, directory in models.items():
        try:
            NetConfig.from_directory(directory)
            for file in weight_files(directory):
                check_tensor_file(file)
        except SlackwaterError as error:
            raise ConfigError(f"--model {name}: {error}") from None
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise ConfigError(
                f"--model {name}: {directory} cannot be read: {type(error).__name__} {error}"
            ) from None


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return [directory / "model.safetensors"]
    return [
        directory / name
        for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
    ]


def check_tensor_file(file: Path) -> None:
    """A safetensors file says how long it is; one that is shorter was cut off."""
    if not file.is_file():
        raise ConfigError.of("model file", str(file), "is missing; safetensors are needed")
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > min(size, _LONGEST_HEADER):
            raise ConfigError.of(
                "model file", str(file), f"is cut off at {size} bytes, or no safetensors"
            )
        header = json.loads(opened.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    whole = 8 + length + max(ends, default=0)
    if size < whole:
        raise ConfigError.of(
            "model file", str(file), f"is cut off: {size} bytes of {whole}; get it again"
        )
