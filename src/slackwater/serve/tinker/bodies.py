"""Request bodies of the Tinker API; unknown fields are refused."""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from slackwater.model.adam import Adam

Finite = Annotated[float, Field(allow_inf_nan=False)]
Seq = Annotated[int, Field(ge=0, lt=2**31)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(max_length=1024)]


class RequestBody(BaseModel):
    """Base of all bodies; fields may be named `model_...`."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ClientConfigBody(RequestBody):
    sdk_version: str


OLDEST_SDK = (0, 6, 0)  # in older ones load_weights does not tell whether to load the optimizer
_TOO_OLD = f"is too old: use tinker {'.'.join(map(str, OLDEST_SDK))} or newer"


def _check_sdk_version(version: str) -> str:
    """Reject old SDKs; other clients may send any string."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found and tuple(map(int, found.groups())) < OLDEST_SDK:
        raise ValueError(f"{version!r} {_TOO_OLD}")
    return version


class CreateSessionBody(RequestBody):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: Annotated[str, AfterValidator(_check_sdk_version)]
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class HeartbeatBody(RequestBody):
    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReasonBody(RequestBody):
    type: Literal["success", "errored", "interrupted"]


class FinishBody(RequestBody):
    reason: FinishReasonBody
    detail: str | None = None


class LoraBody(RequestBody):
    rank: Annotated[int, Field(ge=0, le=4096)]
    seed: Annotated[int | None, Field(ge=0, lt=2**63)] = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(BaseModel):
    """Accepts any field: families other than AdamW are refused by name later."""

    model_config = ConfigDict(extra="allow")
    type: str = "adamw"


class CreateModelBody(RequestBody):
    session_id: str
    model_seq_id: Seq
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = OptimizerBody()
    type: Literal["create_model"] = "create_model"

    @model_validator(mode="before")
    @classmethod
    def _has_session(cls, given: Any) -> Any:
        """Reject the first SDKs, which have no sessions, with a clear message."""
        if isinstance(given, dict) and "session_id" not in given:
            raise ValueError(f"session_id must be given; an SDK that sends none {_TOO_OLD}")
        return given


class ModelBody(RequestBody):
    model_id: str
    type: str | None = None


class AdamBody(RequestBody):
    learning_rate: Annotated[Finite, Field(ge=0)] = 1e-4
    beta1: Annotated[Finite, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[Finite, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[Finite, Field(gt=0)] = 1e-12
    weight_decay: Annotated[Finite, Field(ge=0)] = 0.0
    grad_clip_norm: Finite = 0.0

    def adam(self) -> Adam:
        """The optimizer's parameters; clients send a negative norm for no clipping."""
        values = self.model_dump()
        return Adam(**{**values, "grad_clip_norm": max(self.grad_clip_norm, 0.0)})


class OptimStepBody(RequestBody):
    model_id: str
    seq_id: Seq
    adam_params: AdamBody = Field(validation_alias=AliasChoices("adam_params", "optim_params"))
    type: Literal["optim_step"] = "optim_step"


Ttl = Annotated[int | None, Field(ge=1, le=10 * 366 * 86400)]


class SaveBody(RequestBody):
    model_id: str
    path: str | None = None
    seq_id: Seq
    ttl_seconds: Ttl = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveForSamplerBody(RequestBody):
    model_id: str
    path: str | None = None
    sampling_session_seq_id: Seq | None = None
    seq_id: Seq
    ttl_seconds: Ttl = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveExternalBody(RequestBody):
    model_id: str
    path: str
    seq_id: Seq
    ttl_seconds: Ttl = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class LoadBody(RequestBody):
    model_id: str | None = None
    seq_id: Seq | None = None
    session_id: str | None = None
    model_seq_id: Seq | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerBody | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class ChunkBody(RequestBody):
    tokens: list[Token]
    type: Literal["encoded_text"] = "encoded_text"


class ModelInputBody(RequestBody):
    chunks: list[ChunkBody]


class SamplingBody(RequestBody):
    max_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**64)] = None
    stop: (
        StopString
        | Annotated[list[StopString], Field(max_length=64)]
        | Annotated[list[Token], Field(max_length=1024)]
        | None
    ) = None
    temperature: Annotated[Finite, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0


class TensorBody(RequestBody):
    data: Annotated[list[int] | list[Finite], Field(max_length=1 << 22)]
    dtype: Literal["int64", "float32"]
    shape: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleBody(RequestBody):
    sampling_session_id: str | None = None
    seq_id: Annotated[int | None, Field(ge=0, lt=2**63)] = None
    base_model: str | None = None
    model_path: str | None = None
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    prompt: ModelInputBody
    sampling_params: SamplingBody = SamplingBody()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=64)] = 0
    prompt_logprobs_last_n: Annotated[int | None, Field(ge=1)] = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


class CreateSamplingSessionBody(RequestBody):
    session_id: str
    sampling_session_seq_id: Seq
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionBody(RequestBody):
    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class RetrieveFutureBody(RequestBody):
    request_id: str
    model_id: str | None = None
    allow_metadata_only: bool = False


class FuturesTargetBody(RequestBody):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = 0


class RetrieveFuturesBody(RequestBody):
    target: FuturesTargetBody
    prev_cursor: Annotated[int, Field(ge=0, lt=2**63)] = 0
    timeout: Annotated[Finite | None, Field(ge=0)] = None
    retrieved_request_ids: Annotated[list[str], Field(max_length=1 << 16)] = []


class CancelFutureBody(RequestBody):
    request_id: str


class TinkerPathBody(RequestBody):
    tinker_path: str


class TtlBody(RequestBody):
    ttl_seconds: Ttl = None


class ProjectBody(RequestBody):
    project_id: str


class CopyWeightsBody(RequestBody):
    session_id: str | None = None
    model_seq_id: Seq | None = None
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: Ttl = None
    weights_access_token: str | None = None


class OwnerBody(RequestBody):
    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = []


class StatusQueryBody(RequestBody):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = None


class SearchCursorBody(RequestBody):
    last_created_at: AwareDatetime
    last_session_id: str


class SearchBody(RequestBody):
    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: Annotated[str | None, Field(min_length=1)] = None
    owner: OwnerBody = OwnerBody()
    statuses: list[StatusQueryBody] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursorBody | None = None

    def matches(self, session: dict[str, Any]) -> bool:
        """Whether a session (as `Sessions` describes it) matches this search."""
        return (
            self._matches_name(session)
            and (
                self.project_ids is None or (session["project_id"] or "default") in self.project_ids
            )
            and self.user_metadata.items() <= (session["user_metadata"] or {}).items()
            and self._has_status(session["status"])
            and self._is_after_cursor(session)
        )

    def _matches_name(self, session: dict[str, Any]) -> bool:
        if self.session_id is None and self.display_name is None:
            return True
        words = (self.display_name or "").lower().split()
        name = (session["display_name"] or "").lower()
        named = bool(words) and all(word in name for word in words)
        return named or session["session_id"] == self.session_id

    def _has_status(self, status: dict[str, Any]) -> bool:
        if self.statuses is None:
            return True
        return any(
            query.type == status["type"]
            and (query.reasons is None or status.get("reason", {}).get("type") in query.reasons)
            for query in self.statuses
        )

    def _is_after_cursor(self, session: dict[str, Any]) -> bool:
        """Sessions are sorted by creation, newest first, then by id."""
        if self.cursor is None:
            return True
        last_s = self.cursor.last_created_at.timestamp()
        if session["created_s"] != last_s:
            return bool(session["created_s"] < last_s)
        return bool(session["session_id"] > self.cursor.last_session_id)
