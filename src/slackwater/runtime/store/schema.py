"""The newest tables of the durable store. Times are seconds since the epoch, blobs msgpack."""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from slackwater.runtime.store.op_payloads import FORMAT

metadata = MetaData()


def _request_columns() -> list[Column[Any]]:
    return [
        Column("digest", String, nullable=False),
        Column("status", String, nullable=False),
        Column("result", LargeBinary),
        Column("error", Text),
        Column("owner", String),
        Column("created_s", Float, nullable=False),
        Column("finished_s", Float),
        _format(),
    ]


def _format() -> Column[Any]:
    """Which version of the message format the row's blobs are in (`op_payloads.FORMAT`)."""
    return Column("format", Integer, nullable=False, default=FORMAT, server_default="1")


facts = Table(
    "facts",
    metadata,
    Column("name", String, primary_key=True),
    Column("value", Text, nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session", String, primary_key=True),
    Column("tenant", String, nullable=False, index=True),
    Column("created_s", Float, nullable=False),
    Column("status", Text, nullable=False),  # JSON: active, client_finished, cancelled
    Column(
        "described", Text, nullable=False
    ),  # JSON: tags, user_metadata, display_name, project_id
)

models = Table(
    "models",
    metadata,
    Column("model", String, primary_key=True),
    Column("session", String, nullable=False),
    Column("tenant", String, nullable=False, index=True),
    Column("model_seq", Integer, nullable=False),
    Column("base_model", String, nullable=False),
    Column("lora_rank", Integer, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("train_attn", Boolean, nullable=False),
    Column("train_mlp", Boolean, nullable=False),
    Column("train_unembed", Boolean, nullable=False),
    Column("user_metadata", Text, nullable=False),
    Column("created_s", Float, nullable=False),
    Column("saved_seq", Integer),
    Column("closed", Text),
    UniqueConstraint("session", "model_seq"),
)

operations = Table(
    "operations",
    metadata,
    Column("request", String, primary_key=True),
    Column("model", String, nullable=False),
    Column("tenant", String, nullable=False),
    Column("seq", Integer, nullable=False),
    Column("kind", String, nullable=False),
    *_request_columns(),
    UniqueConstraint("model", "seq"),
    Index("operations_finished", "finished_s"),
)

# What an operation brought with it, which may be megabytes, lies apart: a database writes a row
# anew when one of its columns changes.
operation_payloads = Table(
    "operation_payloads",
    metadata,
    Column("request", String, primary_key=True),
    Column("payload", LargeBinary, nullable=False),
)

sampling_sessions = Table(
    "sampling_sessions",
    metadata,
    Column("sampling_session", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("session", String, nullable=False, index=True),
    Column("seq", Integer),
    Column("base_model", String, nullable=False),
    Column("version", String, nullable=False),
    Column("model_path", String),
    Column("model", String),
    Column("lineage", String, nullable=False),
    Column("clones", Integer, nullable=False, default=0),
    Column("created_s", Float, nullable=False),
)

samples = Table(
    "samples",
    metadata,
    Column("request", String, primary_key=True),
    Column("sampling_session", String, nullable=False),
    Column("tenant", String, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("payload", LargeBinary),
    *_request_columns(),
    UniqueConstraint("sampling_session", "seq"),
    Index("samples_finished", "finished_s"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("path", String, primary_key=True),  # tinker://<model>/<kind>/<name>
    Column("tenant", String, nullable=False, index=True),
    Column("model", String, nullable=False, index=True),
    Column("kind", String, nullable=False),  # weights, sampler_weights
    Column("name", String, nullable=False),
    Column("base_model", String, nullable=False),
    Column("lora_rank", Integer, nullable=False),
    Column("train_attn", Boolean, nullable=False),
    Column("train_mlp", Boolean, nullable=False),
    Column("train_unembed", Boolean, nullable=False),
    Column("held_as", String, nullable=False),  # URI of a state, or weight version
    Column("lineage", String, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_s", Float, nullable=False),
    Column("expires_s", Float),
    Column("public", Boolean, nullable=False, default=False),
    Column("user_metadata", Text),
)

actions = Table(
    "actions",
    metadata,
    Column("action", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("status", String, nullable=False, index=True),  # waiting, started, ended
    Column("result", LargeBinary),
    Column("created_s", Float, nullable=False),
    Column("finished_s", Float),
    _format(),
    Index("actions_finished", "finished_s"),
)

environments = Table(
    "environments",
    metadata,
    Column("environment", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("ended", Text),  # why, once it has
    Column("created_s", Float, nullable=False),
    Column("finished_s", Float),
    _format(),
    Index("environments_finished", "finished_s"),
)

# What a tenant keeps of an environment on a node; `snapshot` is its file name there.
snapshots = Table(
    "snapshots",
    metadata,
    Column("snapshot", String, primary_key=True),
    Column("node", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("name", String, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_s", Float, nullable=False),
)

jobs = Table(
    "jobs",
    metadata,
    Column("job", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("submission", Text, nullable=False),  # JSON: the job file as it was submitted
    Column("attempt", Integer, nullable=False),  # driver processes started so far
    Column("crashes", Integer, nullable=False),  # of them in a row, at the end
    Column("over", String),  # how it ended, once it has
    Column("reason", Text, nullable=False),
    Column("created_s", Float, nullable=False),
    Column("ended_s", Float),
)
