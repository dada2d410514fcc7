"""A job's id, stages and account, from its submission to its end."""

import re
from dataclasses import dataclass
from enum import StrEnum

from slackwater.model.errors import ConfigError
from slackwater.model.ids import JobId, SessionId, TenantId

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class JobStage(StrEnum):
    """Submitted -> profiling -> placed, held, refused -> running -> finished, failed, stopped."""

    SUBMITTED = "submitted"
    PROFILING = "profiling"
    HELD = "held"
    PLACED = "placed"
    RUNNING = "running"
    REFUSED = "refused"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def over(self) -> bool:
        """Whether the job has ended; it may be submitted again."""
        return self in _OVER


_OVER = frozenset({JobStage.REFUSED, JobStage.FINISHED, JobStage.FAILED, JobStage.STOPPED})


@dataclass(slots=True)
class JobAccount:
    """What a job has used: engine and trainer time, tokens, and time waiting for either."""

    engine_s: float = 0.0
    trainer_s: float = 0.0
    turns: int = 0
    failed_turns: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    operations: int = 0
    turns_waited_s: float = 0.0
    operations_waited_s: float = 0.0

    @property
    def device_s(self) -> float:
        return self.engine_s + self.trainer_s


def job_of_session(tenant: TenantId, session: SessionId, name: str | None) -> JobId:
    """The job that a session names; without a name the session is its own job."""
    return JobId(session) if name is None else job_id_of(tenant, name)


def job_of_key(tenant: TenantId, name: str | None) -> JobId:
    """The job of a request without a session: the one it names, else its key's."""
    return JobId(f"{tenant}/-") if name is None else job_id_of(tenant, name)


def job_id_of(tenant: TenantId, name: str) -> JobId:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError.of("job", name, "must be 1-64 letters, digits, . _ -")
    return JobId(f"{tenant}/{name}")
