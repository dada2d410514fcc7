"""The ranks of a deployment: one process each, joined by PyTorch's process groups.

An agent starts every rank with the same layout and rendezvous. Every collective has a deadline. A
rank that fails, or waits beyond the deadline, ends its process; its closed connections end the
other ranks. A deployment fails as a unit.
"""

import contextlib
import faulthandler
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from slackwater.model.errors import ConfigError, SlackwaterError, UnavailableError
from slackwater.nets.tensor_parallel import TensorParallel
from slackwater.weights.plan.layout import Layout

logger = logging.getLogger(__name__)

RANK_VARIABLE = "SLACKWATER_RANK"
WORLD_SIZE_VARIABLE = "SLACKWATER_WORLD_SIZE"
RENDEZVOUS_VARIABLE = "SLACKWATER_RENDEZVOUS"
LAYOUT_VARIABLE = "SLACKWATER_LAYOUT"
DEADLINE_VARIABLE = "SLACKWATER_RANK_DEADLINE_S"
BACKEND_VARIABLE = "SLACKWATER_RANK_BACKEND"
EXIT_RANK_LOST = 4
_DEADLINE_S = 120.0
_STARTUP_GRACE_S = 2.0  # PyTorch's own deadline gives a better error, if it works
_BACKENDS = ("nccl", "gloo")
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "")


@dataclass(frozen=True, slots=True)
class RankPlan:
    """A rank's settings, which the agent passes through environment variables.

    `backend` carries the collectives on a GPU: `nccl`, or `gloo` for ranks that share one.
    """

    rank: int
    layout: Layout
    rendezvous: str
    deadline_s: float = _DEADLINE_S
    backend: str = "nccl"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "RankPlan | None":
        """None for a process that is its whole deployment."""
        size = _whole_number(environment, WORLD_SIZE_VARIABLE, "1")
        if size == 1:
            return None
        layout = Layout.parse(environment.get(LAYOUT_VARIABLE, ""), LAYOUT_VARIABLE)
        if layout.ranks != size:
            raise ConfigError.of(
                LAYOUT_VARIABLE, str(layout), f"must have {size} ranks ({WORLD_SIZE_VARIABLE})"
            )
        rank = _whole_number(environment, RANK_VARIABLE, "")
        if rank >= size:
            raise ConfigError.of(RANK_VARIABLE, rank, f"must be below {size}")
        rendezvous = environment.get(RENDEZVOUS_VARIABLE, "")
        if urlsplit(rendezvous).scheme not in ("tcp", "file"):
            raise ConfigError.of(
                RENDEZVOUS_VARIABLE, rendezvous, "must be tcp://HOST:PORT or file://PATH"
            )
        deadline_s = float(_whole_number(environment, DEADLINE_VARIABLE, f"{_DEADLINE_S:.0f}"))
        backend = environment.get(BACKEND_VARIABLE, "nccl")
        if backend not in _BACKENDS:
            raise ConfigError.of(BACKEND_VARIABLE, backend, f"must be {' or '.join(_BACKENDS)}")
        return cls(rank, layout, rendezvous, deadline_s, backend)


class Ranks:
    """This rank's groups: `tp` splits the layers, `dp` splits the data and the optimizer."""

    def __init__(self, plan: RankPlan, mesh: DeviceMesh) -> None:
        self.rank, self.layout, self.deadline_s = plan.rank, plan.layout, plan.deadline_s
        self.mesh = mesh
        tp_rank, self.dp_rank = plan.layout.position(plan.rank)
        self.dp_group: Any = mesh.get_group("dp")
        self.tp: TensorParallel | None = None
        if plan.layout.tp > 1:
            self.tp = TensorParallel(tp_rank, plan.layout.tp, mesh.get_group("tp"))

    @classmethod
    def join(cls, plan: RankPlan, device: str = "cpu") -> "Ranks":
        """Wait for the other ranks, and check that they run the same code."""
        address = urlsplit(plan.rendezvous)
        if (address.hostname or "") in _LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # reachable from this machine only
        kind = torch.device(device).type
        gloo_alone = kind == "cpu" or plan.backend == "gloo"
        try:
            with _startup_deadline(plan):
                dist.init_process_group(
                    "gloo" if gloo_alone else "cpu:gloo,cuda:nccl",
                    init_method=plan.rendezvous,
                    rank=plan.rank,
                    world_size=plan.layout.ranks,
                    timeout=timedelta(seconds=plan.deadline_s),
                )
        except (RuntimeError, ValueError) as error:  # a DistStoreError is a RuntimeError
            raise UnavailableError(
                f"rank {plan.rank}: the other ranks of {plan.layout} did not come to"
                f" {plan.rendezvous} within {plan.deadline_s:g} s: {error}"
            ) from None
        _check_versions(plan)  # first: ranks of different layouts would wait for each other below
        with _startup_deadline(plan):
            mesh = _create_mesh(plan, kind)
        return cls(plan, mesh)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, the deployment's interface."""
        return self.rank == 0

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's data, on every rank; the others pass None."""
        size = torch.tensor([len(data or b"")])
        dist.broadcast(size, 0)
        held = bytearray(data) if data else bytearray(int(size))
        if not held:
            return b""
        dist.broadcast(torch.frombuffer(held, dtype=torch.uint8), 0)
        return bytes(held)

    def max_over_ranks(self, number: int) -> int:
        found = torch.tensor([number])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def wait_for_all(self) -> None:
        """Wait until every rank is here; if one reports a failure instead, end this process."""
        if self.max_over_ranks(0):
            exit_at_once()

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """Sum over the data ranks, in place."""
        dist.all_reduce(tensor, group=self.dp_group)
        return tensor

    def sum_over_model(self, tensor: Tensor) -> Tensor:
        """Sum over the tensor-parallel ranks, in place."""
        if self.tp is not None:
            dist.all_reduce(tensor, group=self.tp.group)
        return tensor


@contextlib.contextmanager
def _startup_deadline(plan: RankPlan) -> Iterator[None]:
    """End this process with a traceback if PyTorch exceeds its own deadline.

    PyTorch waits for the lock of a rendezvous file without a deadline and with the GIL held: a rank
    that is frozen with the file locked would block the others for ever.
    """
    faulthandler.dump_traceback_later(plan.deadline_s + _STARTUP_GRACE_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _create_mesh(plan: RankPlan, kind: str) -> DeviceMesh:
    """The groups of both dimensions. `init_device_mesh` would give them a deadline of half an hour,
    for which ranks would wait inside a layer for a frozen one.
    """
    ranks = torch.arange(plan.layout.ranks).view(plan.layout.dp, plan.layout.tp)
    timeout = timedelta(seconds=plan.deadline_s)
    groups = [
        dist.new_subgroups_by_enumeration(members.tolist(), timeout=timeout)[0]
        for members in (ranks.T, ranks)
    ]
    return DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=("dp", "tp"))


def exchange(data: bytes) -> list[bytes]:
    """Every rank's data, on every rank."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    room = max(1, *(int(size) for size in sizes))
    found = [torch.empty(room, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(found, torch.frombuffer(bytearray(data.ljust(room)), dtype=torch.uint8))
    return [held[: int(size)].numpy().tobytes() for held, size in zip(found, sizes, strict=True)]


def _check_versions(plan: RankPlan) -> None:
    own = {"slackwater": _package_version(), "torch": str(torch.__version__)}
    own["layout"] = str(plan.layout)
    for rank, data in enumerate(exchange(json.dumps(own).encode())):
        if (other := json.loads(data)) != own:
            raise ConfigError.of(
                f"version of rank {rank}", other, f"must be rank {plan.rank}'s: {own}"
            )


def exit_at_once() -> NoReturn:
    """End this rank without waiting for anything: its closed connections end the others."""
    os._exit(EXIT_RANK_LOST)


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """End this process on a RuntimeError inside, which is what a failed collective raises."""
    try:
        yield
    except SlackwaterError:
        raise
    except RuntimeError as error:
        logger.error("leaving: a rank was lost: %s", error)
        exit_at_once()


def _package_version() -> str:
    try:
        return version("slackwater")
    except PackageNotFoundError:  # run from a checkout
        return "not installed"


def _whole_number(environment: Mapping[str, str], name: str, default: str) -> int:
    value = environment.get(name, default)
    if not value.isdecimal():
        raise ConfigError.of(name, value, "must be a whole number")
    return int(value)
