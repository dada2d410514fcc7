"""Kernels that begin before their predecessor has ended (CUDA's programmatic dependent launch).

A kernel signals when its successor may be placed on the device, and waits for its predecessor to
end before it reads what that wrote. Until then it may read only what no kernel of the step writes,
such as weights. Every program waits before it touches anything else, so the order holds however far
kernels run ahead. `EARLY` is off in Triton's interpreter and before Hopper.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import os
from functools import lru_cache
from typing import TypedDict

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER = (9, 0)


class EarlyStart(TypedDict, total=False):
    """Arguments of a kernel launch."""

    EARLY: bool
    launch_pdl: bool


def early_start(wanted: bool) -> EarlyStart:
    """The arguments for every kernel of a step; they must be the same for all of them."""
    early = wanted and starts_early()
    return {"EARLY": early, "launch_pdl": True} if early else {"EARLY": False}


@lru_cache(maxsize=1)
def starts_early() -> bool:
    """Whether this process's first device supports it."""
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return False
    return bool(torch.cuda.get_device_capability() >= _HOPPER)


@triton.jit
def let_successor_start() -> None:
    """Let the next kernel's programs occupy free multiprocessors."""
    gdc_launch_dependents()


@triton.jit
def wait_for_predecessor() -> None:
    """Wait until everything that earlier kernels wrote is visible."""
    gdc_wait()
