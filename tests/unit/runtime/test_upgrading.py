"""A database is made, brought up to date, or refused in one line."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from first_tables import checkpoints, operations
from first_tables import metadata as first
from msgspec import structs

from slackwater.model.action import ActionSpec, EnvironmentSpec
from slackwater.model.amounts import CORES, Amounts, Need
from slackwater.model.errors import NotFoundError, RefusedError
from slackwater.model.ids import ActionId, EnvironmentId, JobId, TenantId
from slackwater.runtime.store.action_log import (
    ActionRequest,
    EnvironmentRequest,
    add_action,
    add_environment,
    open_actions,
    open_environments,
)
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.op_payloads import FORMAT, LoadPayload
from slackwater.runtime.store.schema import metadata
from slackwater.runtime.store.schema import operations as operations_now
from slackwater.wire.sandbox import ActionLimits


def opened(url: str) -> None:
    async def open_and_close() -> None:
        store = Store(url)
        await store.open()
        await store.close()

    asyncio.run(open_and_close())


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'slackwater.db'}"


@pytest.mark.parametrize("is_new", [True, False])
def test_a_new_database_and_all_steps_end_in_the_tables_that_the_code_uses(
    url: str, is_new: bool
) -> None:
    if not is_new:
        with sa.create_engine(url).begin() as connection:
            first.create_all(connection)
    opened(url)
    with sa.create_engine(url).connect() as connection:
        found = MigrationContext.configure(connection)
        assert compare_metadata(found, metadata) == []
        assert found.get_current_revision() == "0006"
        indexes = {i["name"] for i in sa.inspect(connection).get_indexes("operations")}
        assert indexes == {index.name for index in metadata.tables["operations"].indexes}


def test_a_database_of_version_0_1_0_keeps_its_rows(url: str) -> None:
    with sa.create_engine(url).begin() as connection:
        first.create_all(connection)
        row = {"request": "op-1", "model": "m", "tenant": "t", "seq": 1, "kind": "create"}
        connection.execute(
            operations.insert().values(**row, digest="d", status="waiting", created_s=1.0)
        )
        saved = {"path": "tinker://m/weights/half", "tenant": "t", "model": "m", "name": "half"}
        shape = {"lora_rank": 1, "train_attn": True, "train_mlp": True, "train_unembed": True}
        held = {"held_as": "/home/of/before/checkpoints/m:train:0/half@5", "lineage": "l"}
        rest = {"kind": "weights", "base_model": "b", "size_bytes": 1, "created_s": 1.0}
        connection.execute(
            checkpoints.insert().values(**saved, **shape, **held, **rest, public=False)
        )
    opened(url)
    opened(url)  # a second start finds nothing to do
    with sa.create_engine(url).connect() as connection:
        assert connection.execute(
            sa.select(operations_now.c.request, operations_now.c.format)
        ).one() == ("op-1", 1)
        uri = connection.execute(sa.select(checkpoints.c.held_as)).scalar_one()
        assert uri == "slackwater:checkpoints/m:train:0/half@5"


def test_new_rows_say_which_format_their_messages_are_in(url: str) -> None:
    opened(url)
    with sa.create_engine(url).begin() as connection:
        row = {"request": "op-1", "model": "m", "tenant": "t", "seq": 1, "kind": "create"}
        connection.execute(
            operations_now.insert().values(**row, digest="d", status="waiting", created_s=1.0)
        )
        assert connection.execute(sa.select(operations_now.c.format)).scalar_one() == FORMAT


def test_a_load_of_the_first_format_names_the_same_state() -> None:
    old = LoadPayload("tinker://m/weights/half", "/home/of/before/checkpoints/m/half@5", True)
    assert old.saved == "slackwater:checkpoints/m/half@5"


def test_a_newer_database_is_refused_in_one_line_and_left_alone(url: str) -> None:
    opened(url)
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(RefusedError, match=r"step 9999.*newer Slackwater") as error:
        opened(url)
    assert "\n" not in str(error.value)


def test_actions_of_tenants_with_dots_are_told_apart_by_their_owners(url: str) -> None:
    """Version 0.1 named them TENANT.NAME; `team` and `team.ml` could mean one by another's name."""
    spec = ActionSpec(
        *(ActionId("team.ml.x"), JobId("team.ml/default"), "sh"),
        (Need(CORES, Amounts.exactly(1)),),
        tenant=TenantId("team.ml"),
    )
    limits = ActionLimits(1.0, 1, 1, 1, 1, network=False)
    request = ActionRequest(spec, limits, ["true"])
    place = EnvironmentSpec(EnvironmentId("team.e"), JobId("team/default"), 8)
    wanted = EnvironmentRequest(place, "team.s")
    with sa.create_engine(url).begin() as connection:
        first.create_all(connection)
    opened(url)
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '0005'"))
        connection.execute(sa.text("DROP TABLE snapshots"))
        add_action(connection, TenantId("team.ml"), request, 1.0)
        add_environment(connection, TenantId("team"), wanted, 1.0)
    opened(url)
    with sa.create_engine(url).begin() as connection:
        ((tenant, found, _, _),) = open_actions(connection)
        assert (tenant, found.spec.action, found.spec.tenant) == ("team.ml", "x@team.ml", "team.ml")
        ((tenant, kept),) = open_environments(connection)
        assert (tenant, kept.spec.environment, kept.spec.tenant) == ("team", "team.e", "team")
        assert kept.snapshot == "s"
        # Asked for again after the upgrade, it is the same one.
        again = structs.replace(request, spec=replace(spec, action=ActionId("x@team.ml")))
        assert not add_action(connection, TenantId("team.ml"), again, 2.0)
        with pytest.raises(NotFoundError):
            add_action(connection, TenantId("team"), again, 2.0)
