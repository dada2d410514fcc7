"""Checks before a service starts; they read headers only and do not import PyTorch."""

import ctypes
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slackwater.model.errors import ConfigError, RefusedError

if TYPE_CHECKING:
    from slackwater.runtime.launch.fleet_file import FleetFile
    from slackwater.runtime.settings import ServiceSettings

_LEAST_FREE_BYTES = 4 << 20
HOW_TO_ISOLATE = "install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap)"


def check_device(device: str) -> None:
    """Check that it is `cpu`, `cuda` or `cuda:N`, and exists."""
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise ConfigError.of("--device", device, "must be cpu, cuda or cuda:N")
    if kind == "cuda" and (found := _cuda_devices()) <= int(number or 0):
        raise RefusedError(
            f"--device: {device} is not here ({found} CUDA devices found); use --device cpu"
        )


def check_room(state: Path) -> None:
    """Refuse a disk so full that the service could not even log why it stops."""
    existing = next(path for path in (state, *state.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < _LEAST_FREE_BYTES:
        fix = f"is on a disk with {free >> 10} KiB free; free some space, or give another --state"
        raise RefusedError(f"--state: {str(state)!r} {fix}")


def check_folder(field: str, folder: Path) -> None:
    """Check that the folder can be made, or be written to; leaves nothing."""
    try:
        absolute = folder.expanduser().absolute()
        existing = next(path for path in (absolute, *absolute.parents) if path.exists())
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        fix = f"cannot be written ({error.strerror}); name a folder that this user can make"
        raise ConfigError.of(field, str(folder), fix) from None


def check_node_folders(fleet: "FleetFile") -> None:
    """Check the folders of nodes that are started on this machine."""
    for node in fleet.nodes if fleet.launcher == "local" else ():
        if node.directory is not None:
            check_folder(f"nodes: {node.name}: directory", Path(node.directory))


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

    Nodes of a fleet file are other machines, which check their sandboxes when they join.
    """
    from slackwater.sandbox.choice import find_isolation_gap

    if settings.fleet is not None or not settings.sandboxes:
        return
    why = find_isolation_gap(settings.sandbox_backend)
    if why is None:
        return
    if tenants > 1 and not settings.trust_tenants:
        raise RefusedError(
            f"--sandbox-backend: {tenants} tenants need isolated sandboxes, which are missing here "
            f"({why}); {HOW_TO_ISOLATE}, or give --trust-tenants if you trust them all"
        )
    print(
        f"WARNING: actions are not isolated ({why}). Code that they run, also code that a model "
        "wrote, can read and change everything that this user can, including the service's keys; "
        f"{HOW_TO_ISOLATE}",
        file=sys.stderr,
    )


def check_models(models: Mapping[str, Path]) -> None:
    """Check that the engine has every model's architecture and that its weights are complete."""
    from slackwater.zoo.sources import describe_model

    for name, directory in models.items():
        if problem := describe_model(name, directory).problem:
            raise ConfigError(f"--model {name}: {problem}")
