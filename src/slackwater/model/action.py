"""Actions: atomic uses of resources outside the training cluster, for a tool call or a reward."""

import math
from dataclasses import dataclass
from enum import StrEnum

from slackwater.model.amounts import CORES, GPUS, Elastic, Need
from slackwater.model.errors import ConfigError
from slackwater.model.ids import (
    NOBODY,
    ActionId,
    EnvironmentId,
    JobId,
    NodeId,
    ResourceName,
    ServiceName,
    TenantId,
)


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """An action: its owner, where it must run, and the resources it needs (ARL-Tangram 4.1).

    `kind` is the label under which durations are learned. `single_unit_s` is the duration on one
    unit of the elastic resource, if known. The action must end within `deadline_s` of its
    submission, and may run for `limit_s`. If its worker is lost it is retried `retries` times, but
    never in an environment, because the environment's state is lost too.
    """

    action: ActionId
    job: JobId
    kind: str
    needs: tuple[Need, ...]
    environment: EnvironmentId | None = None
    service: ServiceName | None = None
    elastic: Elastic | None = None
    single_unit_s: float | None = None
    deadline_s: float | None = None
    limit_s: float | None = None
    priority: int = 0
    retries: int = 0
    tenant: TenantId = NOBODY

    def __post_init__(self) -> None:
        where = f"action {self.action}"
        names = [need.resource for need in self.needs]
        if not names or len(set(names)) < len(names):
            raise ConfigError.of(
                f"{where}: needs", names, "must name each resource once, one at least"
            )
        if self.elastic is not None and self.elastic.resource not in names:
            raise ConfigError.of(
                f"{where}: elastic", self.elastic.resource, f"must be one of its needs: {names}"
            )
        for field in ("single_unit_s", "deadline_s", "limit_s"):
            value = getattr(self, field)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError.of(f"{where}: {field}", value, "must be above 0 and finite")
        if self.retries < 0 or (self.retries and self.environment is not None):
            raise ConfigError.of(
                f"{where}: retries", self.retries, "must be 0 or more, and 0 in an environment"
            )
        if (self.service is not None) != (GPUS in names):
            raise ConfigError.of(
                f"{where}: service", self.service, "must be named if and only if it needs gpus"
            )
        if self.environment is not None and CORES not in names:
            raise ConfigError.of(
                f"{where}: needs", names, "must name cores to run in an environment"
            )
        if GPUS in names and CORES in names:
            raise ConfigError.of(f"{where}: needs", names, "must name cores or gpus, not both")

    def need(self, resource: ResourceName) -> Need | None:
        return next((need for need in self.needs if need.resource == resource), None)


class OutcomeKind(StrEnum):
    """How an action ended. DONE: it ran to its end, whatever its exit status."""

    DONE = "done"
    FAILED = "failed"  # it could not be run, or broke its limits of memory, output or processes
    TIMED_OUT = "timed_out"  # its deadline passed or its running time was used up
    CANCELLED = "cancelled"  # by its owner
    LOST = "lost"  # its worker or environment was lost
    REFUSED = "refused"  # it can never run here, or the queue is full


@dataclass(frozen=True, slots=True)
class Grant:
    """The resources of one running action. Cores and GPUs are exclusive until it ends.

    `amounts` has every requested resource; `gpus` are an aligned chunk of the node.
    """

    amounts: tuple[tuple[ResourceName, int], ...]
    node: NodeId | None = None
    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()

    def amount(self, resource: ResourceName) -> int:
        return next((units for name, units in self.amounts if name == resource), 0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an action ended: `queued_s` before its start, `ran_s` as its worker measured it."""

    kind: OutcomeKind
    reason: str = ""
    queued_s: float = 0.0
    ran_s: float = 0.0
    grant: Grant | None = None


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """A trajectory's environment: on one node, with memory for life, no cores between actions."""

    environment: EnvironmentId
    job: JobId
    memory_mib: int
    priority: int = 0
    tenant: TenantId = NOBODY

    def __post_init__(self) -> None:
        if self.memory_mib < 0:
            raise ConfigError.of(
                f"environment {self.environment}: memory_mib", self.memory_mib, "must be 0 or more"
            )


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """A worker's resources: core numbers by NUMA node, memory for environments, GPUs with their
    memory each, and host memory to stage services.
    """

    cores: tuple[tuple[int, ...], ...] = ()
    memory_mib: int = 0
    gpus: int = 0
    gpu_mib: int = 0
    staging_mib: int = 0

    def __post_init__(self) -> None:
        numbers = [core for numa in self.cores for core in numa]
        if len(set(numbers)) < len(numbers):
            raise ConfigError.of("cores", self.cores, "must name each core once")
        if min(self.memory_mib, self.gpus, self.gpu_mib, self.staging_mib) < 0:
            raise ConfigError.of("capacity", self, "must not be negative")


@dataclass(frozen=True, slots=True)
class Limit:
    """A resource without workers: at most `concurrency` units at once, `quota` per `window_s`."""

    resource: ResourceName
    concurrency: int | None = None
    quota: int | None = None
    window_s: float = 1.0

    def __post_init__(self) -> None:
        where = f"limit {self.resource}"
        if self.concurrency is None and self.quota is None:
            raise ConfigError.of(where, None, "must have a concurrency, a quota, or both")
        for field in ("concurrency", "quota"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError.of(f"{where}: {field}", value, "must be 1 or more")
        if not (self.window_s > 0 and math.isfinite(self.window_s)):
            raise ConfigError.of(f"{where}: window_s", self.window_s, "must be above 0 and finite")


@dataclass(frozen=True, slots=True)
class ServiceShape:
    """One way to load a service: the number of GPUs, memory of each, and time to restore."""

    gpus: int
    gpu_mib: int
    restore_s: float


@dataclass(frozen=True, slots=True)
class GpuService:
    """A reward or judge model, staged in host memory and restored onto GPUs on demand."""

    service: ServiceName
    degrees: tuple[ServiceShape, ...]
    host_mib: int = 0

    def __post_init__(self) -> None:
        sizes = [degree.gpus for degree in self.degrees]
        if not sizes or len(set(sizes)) < len(sizes) or not set(sizes) <= {1, 2, 4, 8}:
            raise ConfigError.of(
                f"service {self.service}: degrees", sizes, "must be different ones of 1, 2, 4 and 8"
            )

    def degree(self, gpus: int) -> ServiceShape | None:
        """The shape on this many GPUs, if there is one."""
        return next((degree for degree in self.degrees if degree.gpus == gpus), None)
