"""Request bodies of the action API and their translation for the broker."""

import secrets
import struct
from typing import Annotated

from pydantic import Field

from slackwater.model.action import ActionSpec, EnvironmentSpec
from slackwater.model.action_input import check_command, check_file_names
from slackwater.model.amounts import CORES, GPUS, MEMORY_MIB, Amounts, Efficiency, Elastic, Need
from slackwater.model.errors import ConfigError
from slackwater.model.ids import (
    ActionId,
    EnvironmentId,
    ResourceName,
    ServiceName,
    TenantId,
    qualify_id,
)
from slackwater.model.tenant_limits import (
    TenantLimits,
    check_action,
    check_ceilings,
    check_environment,
    check_network,
)
from slackwater.runtime.services.actions import job_of
from slackwater.runtime.store.action_log import ActionRequest, EnvironmentRequest
from slackwater.serve.tinker.bodies import Finite, RequestBody
from slackwater.wire.sandbox import ActionLimits

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_:-][A-Za-z0-9_.:-]{0,99}$")]
Positive = Annotated[Finite, Field(gt=0, le=7 * 86_400)]
Cores = Annotated[int, Field(ge=1, le=4096)]
Token = Annotated[int, Field(ge=0, lt=1 << 32)]
Units = Annotated[int, Field(ge=1, le=1 << 53)]
_DEFAULT_WALL_S = 600.0
_MIB = 1 << 20
_DEFAULT_LIMITS = {"output_bytes": _MIB, "memory_mib": 2048, "processes": 256, "disk_mib": 1024}
_DEFAULT_ENVIRONMENT_MIB = 512


class LimitsBody(RequestBody):
    """Upper limits of an action; in an environment its memory defaults to the environment's."""

    output_bytes: Annotated[int, Field(ge=1, le=16 * _MIB)] | None = None
    memory_mib: Annotated[int, Field(ge=1, le=1 << 22)] | None = None
    processes: Annotated[int, Field(ge=1, le=65_536)] | None = None
    disk_mib: Annotated[int, Field(ge=1, le=1 << 22)] | None = None
    network: bool = False

    def resolve(
        self, tenant: TenantId, limits: TenantLimits, wall_s: float, environment_mib: int | None
    ) -> ActionLimits:
        """Fill in defaults within the operator's limits; refuse explicit values beyond them."""
        given = {name: getattr(self, name) for name in _DEFAULT_LIMITS}
        explicit = {f"limits.{name}": value for name, value in given.items() if value is not None}
        check_ceilings(tenant, limits, explicit | {"limit_s": wall_s})
        check_network(tenant, limits, self.network)
        defaults = _DEFAULT_LIMITS | (
            {} if environment_mib is None else {"memory_mib": environment_mib}
        )
        if self.memory_mib is not None and self.memory_mib > (environment_mib or self.memory_mib):
            fix = f"must be at most {environment_mib}, the memory of its environment"
            raise ConfigError.of("limits.memory_mib", self.memory_mib, fix)
        amounts = {
            name: min(defaults[name], getattr(limits, name)) if value is None else value
            for name, value in given.items()
        }
        return ActionLimits(
            wall_s=wall_s,
            output_bytes=amounts["output_bytes"],
            memory_bytes=amounts["memory_mib"] * _MIB,
            processes=amounts["processes"],
            disk_bytes=amounts["disk_mib"] * _MIB,
            network=self.network,
        )


class ActionBody(RequestBody):
    """A command on `cores`: a number, or choices where `parallel_share` of the work speeds up.

    With a `service` the action scores `tokens`: its stdout holds their log-probs under that model,
    as JSON. With neither it is a permit for `uses`: wait on `held`, use it, then call `done`.
    """

    command: Annotated[list[str], Field(max_length=4096)] = Field(default_factory=list)
    action: Name | None = None
    job: Name | None = None
    kind: Name | None = None
    environment: str | None = None
    service: Name | None = None
    tokens: Annotated[list[Token], Field(max_length=1 << 20)] = Field(default_factory=list)
    cores: Cores | Annotated[list[Cores], Field(min_length=1, max_length=64)] = 1
    parallel_share: Annotated[Finite, Field(ge=0, le=1)] = 1.0
    single_core_s: Positive | None = None
    uses: dict[Name, Units] = Field(default_factory=dict)
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    deadline_s: Positive | None = None
    limit_s: Positive | None = None
    retries: Annotated[int, Field(ge=0, le=10)] = 0
    limits: LimitsBody = Field(default_factory=LimitsBody)
    variables: dict[str, str] = Field(default_factory=dict)
    stdin: str = ""
    stream: bool = False
    wait_s: Annotated[Finite, Field(ge=0, le=30)] = 0.0

    def to_request(
        self, tenant: TenantId, limits: TenantLimits, environment_mib: int | None = None
    ) -> ActionRequest:
        """Build the broker's and the worker's request for a tenant with these limits."""
        wall_s = self.limit_s or min(_DEFAULT_WALL_S, limits.limit_s)
        action_limits = self.limits.resolve(tenant, limits, wall_s, environment_mib)
        given = self.action
        name = ActionId(
            qualify_id(tenant, given, "action") if given else f"ac-{secrets.token_hex(12)}"
        )
        spec = ActionSpec(
            action=name,
            job=job_of(tenant, self.job),
            kind=self.kind or self._default_kind(),
            needs=self._needs(action_limits.memory_bytes // _MIB),
            environment=None if self.environment is None else EnvironmentId(self.environment),
            service=None if self.service is None else ServiceName(self.service),
            elastic=self._elastic(),
            single_unit_s=self.single_core_s,
            deadline_s=self.deadline_s,
            limit_s=wall_s,
            priority=self.priority,
            retries=self.retries,
            tenant=tenant,
        )
        check_command(self.command, self.variables)
        check_action(spec, limits)
        return ActionRequest(
            spec=spec,
            limits=action_limits,
            command=self.command,
            variables=self.variables,
            stdin=self._stdin(),
            stream=self.stream,
        )

    def _needs(self, memory_mib: int) -> tuple[Need, ...]:
        uses = tuple(
            Need(ResourceName(name), Amounts.exactly(units)) for name, units in self.uses.items()
        )
        if self.service is not None:
            self._check_score()
            return (Need(GPUS, Amounts.exactly(1)), *uses)
        if self.tokens:
            raise ConfigError.of("tokens", len(self.tokens), "must be empty without a `service`")
        if not self.command:
            if not uses:
                raise ConfigError.of(
                    "command",
                    [],
                    "must not be empty, unless `uses` names a limit or `service` a model",
                )
            return uses
        choices = [self.cores] if isinstance(self.cores, int) else self.cores
        needs = (Need(CORES, Amounts.from_choices(*choices)), *uses)
        if self.environment is None:  # an environment reserves its own memory
            needs += (Need(MEMORY_MIB, Amounts.exactly(memory_mib)),)
        return needs

    def _check_score(self) -> None:
        if self.command or self.environment is not None or self.stdin:
            fix = "takes only `tokens`: leave out command, environment and stdin"
            raise ConfigError.of("service", self.service, fix)
        if len(self.tokens) < 2:
            raise ConfigError.of("tokens", len(self.tokens), "must hold at least 2 token ids")

    def _default_kind(self) -> str:
        if self.service is not None:
            return f"service:{self.service}"
        return self.command[0] if self.command else "permit"

    def _stdin(self) -> bytes:
        if self.service is None:
            return self.stdin.encode()
        return struct.pack(f"<{len(self.tokens)}I", *self.tokens)

    def _elastic(self) -> Elastic | None:
        if isinstance(self.cores, int) or not self.command:
            return None
        return Elastic(CORES, Efficiency.amdahl(self.parallel_share, max(self.cores)))


class EnvironmentBody(RequestBody):
    """An environment with `files`, optionally from a `snapshot`."""

    environment: Name | None = None
    job: Name | None = None
    memory_mib: Annotated[int, Field(ge=1, le=1 << 22)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    snapshot: Name | None = None
    files: dict[str, str] = Field(default_factory=dict)
    wait_s: Annotated[Finite, Field(ge=0, le=30)] = 10.0

    def to_request(self, tenant: TenantId, limits: TenantLimits) -> EnvironmentRequest:
        given = self.environment
        name = EnvironmentId(
            qualify_id(tenant, given, "environment") if given else f"en-{secrets.token_hex(12)}"
        )
        job = job_of(tenant, self.job)
        memory_mib = self.memory_mib or min(_DEFAULT_ENVIRONMENT_MIB, limits.memory_mib)
        spec = EnvironmentSpec(name, job, memory_mib, self.priority, tenant)
        check_environment(spec, limits)
        check_file_names(self.files)
        files = {path: text.encode() for path, text in self.files.items()}
        return EnvironmentRequest(spec, self.snapshot, files)


class SnapshotBody(RequestBody):
    snapshot: Name


class DoneBody(RequestBody):
    ran_s: Annotated[Finite, Field(ge=0)] = 0.0


class LimitBody(RequestBody):
    """An external resource: a limit of concurrent uses, of uses per window, or both."""

    concurrency: Units | None = None
    quota: Units | None = None
    window_s: Positive = 1.0
