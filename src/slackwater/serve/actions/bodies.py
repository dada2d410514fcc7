"""Request bodies of the action API, and what they mean to the broker."""

import secrets
import struct
from typing import Annotated

from pydantic import Field

from slackwater.model.action import ActionSpec, EnvironmentSpec
from slackwater.model.amounts import CORES, GPUS, MEMORY_MIB, Amounts, Efficiency, Elastic, Need
from slackwater.model.errors import ConfigError
from slackwater.model.ids import ActionId, EnvironmentId, ResourceName, ServiceName, TenantId
from slackwater.runtime.services.actions import job_of
from slackwater.runtime.store.action_log import ActionRequest, EnvironmentRequest
from slackwater.serve.tinker.bodies import Body, Finite
from slackwater.wire.sandbox import ActionLimits

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_:-][A-Za-z0-9_.:-]{0,99}$")]
Positive = Annotated[Finite, Field(gt=0, le=7 * 86_400)]
Cores = Annotated[int, Field(ge=1, le=4096)]
Token = Annotated[int, Field(ge=0, lt=1 << 32)]
Units = Annotated[int, Field(ge=1, le=1 << 53)]
_DEFAULT_WALL_S = 600.0
_MIB = 1 << 20


class LimitsBody(Body):
    """What the action may use at most."""

    output_bytes: Annotated[int, Field(ge=1, le=16 * _MIB)] = _MIB
    memory_mib: Annotated[int, Field(ge=1, le=1 << 22)] = 2048
    processes: Annotated[int, Field(ge=1, le=65_536)] = 256
    disk_mib: Annotated[int, Field(ge=1, le=1 << 22)] = 1024
    network: bool = False


class ActionBody(Body):
    """`cores` is a number or choices; with choices, `parallel_share` is what of the work more cores speed up.

    With a `service` it is a score: `tokens` are a text's ids, of whose log-probs under the service's model the outcome's
    stdout tells, as JSON. Without either it is a permit for `uses`: wait until it is held, use it, then say `done`.
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

    def request(self, tenant: TenantId) -> ActionRequest:
        """What the broker and the worker are asked."""
        given = self.action
        name = ActionId(f"{tenant}.{given}" if given else f"ac-{secrets.token_hex(12)}")
        wall_s = self.limit_s or _DEFAULT_WALL_S
        spec = ActionSpec(
            action=name,
            job=job_of(tenant, self.job),
            kind=self.kind or self._usual_kind(),
            needs=self._needs(),
            environment=None if self.environment is None else EnvironmentId(self.environment),
            service=None if self.service is None else ServiceName(self.service),
            elastic=self._elastic(),
            single_unit_s=self.single_core_s,
            deadline_s=self.deadline_s,
            limit_s=wall_s,
            priority=self.priority,
            retries=self.retries,
        )
        limits = ActionLimits(
            wall_s=wall_s,
            output_bytes=self.limits.output_bytes,
            memory_bytes=self.limits.memory_mib * _MIB,
            processes=self.limits.processes,
            disk_bytes=self.limits.disk_mib * _MIB,
            network=self.limits.network,
        )
        return ActionRequest(
            spec=spec,
            limits=limits,
            command=self.command,
            variables=self.variables,
            stdin=self._stdin(),
            stream=self.stream,
        )

    def _needs(self) -> tuple[Need, ...]:
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
        needs = (Need(CORES, Amounts.one_of(*choices)), *uses)
        if self.environment is None:  # an environment has memory of its own
            needs += (Need(MEMORY_MIB, Amounts.exactly(self.limits.memory_mib)),)
        return needs

    def _check_score(self) -> None:
        if self.command or self.environment is not None or self.stdin:
            fix = "takes `tokens` alone: no command, environment or stdin"
            raise ConfigError.of("service", self.service, fix)
        if len(self.tokens) < 2:
            raise ConfigError.of("tokens", len(self.tokens), "must be at least 2, the text's ids")

    def _usual_kind(self) -> str:
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


class EnvironmentBody(Body):
    """`snapshot` names what it begins from; `files` are put into it."""

    environment: Name | None = None
    job: Name | None = None
    memory_mib: Annotated[int, Field(ge=0, le=1 << 22)] = 512
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    snapshot: Name | None = None
    files: dict[str, str] = Field(default_factory=dict)
    wait_s: Annotated[Finite, Field(ge=0, le=30)] = 10.0

    def request(self, tenant: TenantId) -> EnvironmentRequest:
        given = self.environment
        name = EnvironmentId(f"{tenant}.{given}" if given else f"en-{secrets.token_hex(12)}")
        spec = EnvironmentSpec(name, job_of(tenant, self.job), self.memory_mib, self.priority)
        snapshot = None if self.snapshot is None else f"{tenant}.{self.snapshot}"
        files = {path: text.encode() for path, text in self.files.items()}
        return EnvironmentRequest(spec, snapshot, files)


class SnapshotBody(Body):
    snapshot: Name


class DoneBody(Body):
    ran_s: Annotated[Finite, Field(ge=0)] = 0.0


class LimitBody(Body):
    """A resource that no worker brings: at most so many at once, at most so many in any window, or both."""

    concurrency: Units | None = None
    quota: Units | None = None
    window_s: Positive = 1.0
