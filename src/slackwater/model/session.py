"""Sessions, trained models and sampling sessions."""

from dataclasses import dataclass

from slackwater.model.ids import JobId, ModelId, SamplingSessionId, SessionId, TenantId


@dataclass(frozen=True, slots=True)
class LoraShape:
    """Rank 0 is full fine-tuning; the flags say which layers an adapter changes."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class Session:
    """A client's session: it owns models, belongs to a job, and ends when heartbeats stop."""

    session: SessionId
    tenant: TenantId
    created_s: float
    job: JobId


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """One model in training; `model_seq` counts those of its session."""

    model: ModelId
    session: SessionId
    tenant: TenantId
    model_seq: int
    base_model: str
    lora: LoraShape
    seed: int
    created_s: float


@dataclass(frozen=True, slots=True)
class SamplingSession:
    """An immutable snapshot of weights to sample from. Default seeds are derived from `lineage`,
    which identifies the origin of the weights without random ids.
    """

    sampling_session: SamplingSessionId
    tenant: TenantId
    session: SessionId
    base_model: str
    version: str
    lineage: str
    model_path: str | None = None
    model: ModelId | None = None
