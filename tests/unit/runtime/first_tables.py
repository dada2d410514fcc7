"""The tables of a database that version 0.1.0 made."""

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

metadata = MetaData()


def _request_columns() -> list[Column[Any]]:
    """What is kept of any request, from its coming to its answer."""
    return [
        Column("digest", String, nullable=False),
        Column("payload", LargeBinary),
        Column("status", String, nullable=False),
        Column("result", LargeBinary),
        Column("error", Text),
        Column("owner", String),
        Column("created_s", Float, nullable=False),
        Column("finished_s", Float),
    ]


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
    Column("held_as", String, nullable=False),  # folder of a state, or weight version
    Column("lineage", String, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_s", Float, nullable=False),
    Column("expires_s", Float),
    Column("public", Boolean, nullable=False, default=False),
    Column("user_metadata", Text),
)
