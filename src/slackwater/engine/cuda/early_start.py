"""Kernels that begin before the one before them has ended (CUDA's programmatic dependent launch,
from Hopper on).

A kernel says when its successor may be placed on the device, and waits for its predecessor to end
when it needs what that wrote; until then it may read what no kernel of the step writes, such as
weights. Every program of every such kernel waits before it touches anything else; so what is
ordered stays ordered, however far kernels run ahead. `EARLY` is off in Triton's interpreter and on
older devices.
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
    """What a launch is told."""

    EARLY: bool
    launch_pdl: bool


def early_start(wanted: bool) -> EarlyStart:
    """Every kernel of a step is told the same."""
    early = wanted and starts_early()
    return {"EARLY": early, "launch_pdl": True} if early else {"EARLY": False}


@lru_cache(maxsize=1)
def starts_early() -> bool:
    """Whether this process's first device can."""
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return False
    return bool(torch.cuda.get_device_capability() >= _HOPPER)


@triton.jit
def let_successor_start() -> None:
    """The next kernel's programs may take what room is left."""
    gdc_launch_dependents()


@triton.jit
def wait_for_predecessor() -> None:
    """All that earlier kernels wrote is there."""
    gdc_wait()
