"""Tenants whose names begin with another's (`team`, `team.ml`): nobody reaches what is not its own,
in any store."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from paper_worker import Caller, PaperWorker
from test_app import post

from harness.service_plane import with_plane
from slackwater.model.errors import ConfigError, NotFoundError
from slackwater.model.ids import (
    JobId,
    ModelId,
    TenantId,
    old_snapshot_id,
    qualify_id,
    resolve_id,
    snapshot_id,
)
from slackwater.model.job_file import JobFile
from slackwater.model.job_life import job_id_of
from slackwater.model.session import LoraShape
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.services.actions import job_of
from slackwater.runtime.services.tenants import Tenants
from slackwater.runtime.store.checkpoints import Checkpoint, find_checkpoint, put_checkpoint
from slackwater.runtime.store.job_accounts import add_job
from slackwater.runtime.store.state_directory import StateDirectory

TEAM, ML = TenantId("team"), TenantId("team.ml")
PAIRS = ((TEAM, "ml.x"), (ML, "x"), (TEAM, "ml:x"), (TenantId("team.ml-x"), "-"), (ML, "x.y"))
TENANTS = {"tenants": ("team", "team.ml"), "sandboxes": 1}
Work = Callable[[PaperWorker, Caller, Caller], Awaitable[None]]


def with_two(folder: Path, work: Work) -> None:
    async def both(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        await plane.actions.adopt()
        worker = PaperWorker(plane, folder)
        await work(worker, Caller(plane, client, "team"), Caller(plane, client, "team.ml"))

    with_plane(folder, both, **TENANTS)


def test_two_owners_never_share_an_id() -> None:
    for make in (qualify_id, snapshot_id, job_of, job_id_of):
        arguments = [(*pair, "field") if make is qualify_id else pair for pair in PAIRS]
        named = [one for one in arguments if make is not job_id_of or ":" not in one[1]]
        ids = {make(*one) for one in named}
        assert len(ids) == len(named)
        assert not any("/" in one for one in ids if make in (qualify_id, snapshot_id))


@pytest.mark.parametrize("name", ["team.x", "ac-" + "0" * 24, "en-" + "a" * 24, "x@team.ml"])
def test_a_name_that_could_be_another_id_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="could be another tenant's id"):
        qualify_id(TEAM, name, "action")


def test_an_id_of_an_older_version_means_the_callers_own() -> None:
    assert resolve_id(TEAM, "team.x") == resolve_id(TEAM, "x") == qualify_id(TEAM, "x", "action")
    assert resolve_id(TEAM, "team.ml.x") == qualify_id(TEAM, "ml.x", "action")
    assert resolve_id(ML, "x@team") == "x@team"  # whole; its owner is looked up


def test_an_old_snapshot_that_two_could_own_is_nobodys() -> None:
    tenants = ["team", "team.ml", "other"]
    assert old_snapshot_id(TEAM, "x", tenants) == "team.x"
    assert old_snapshot_id(TEAM, "ml.x", tenants) is None
    assert old_snapshot_id(ML, "x", tenants) is None
    assert old_snapshot_id(ML, "x", ["team.ml", "other"]) == "team.ml.x"


def test_actions_are_their_tenants_own(tmp_path: Path) -> None:
    async def work(worker: PaperWorker, team: Caller, ml: Caller) -> None:
        mine = (await ml.post("actions", command=["true"], action="x")).json()["action"]
        theirs = await team.post("actions", command=["other"], action="ml.x")
        assert theirs.status_code == 202, theirs.text
        assert theirs.json()["action"] != mine
        for name in (mine, "team.ml.x", "x"):
            assert (await team.post(f"actions/{name}/done")).status_code in (400, 404)
            if name != "team.ml.x":
                assert (await team.get(f"actions/{name}")).status_code == 404
        await team.post(f"actions/{mine}/cancel")
        assert not any("StopAction" in type(one).__name__ for one in worker.told)
        worker.finish(worker.runs()[0].attempt)
        assert (await ml.get("actions/x?wait_s=5")).json()["outcome"] == "done"
        assert (await team.get(f"actions/{mine}")).status_code == 404

    with_two(tmp_path, work)


def test_environments_and_snapshots_are_their_tenants_own(tmp_path: Path) -> None:
    async def work(worker: PaperWorker, team: Caller, ml: Caller) -> None:
        secret = await ml.post("environments", environment="e", memory_mib=8)
        assert secret.status_code == 201, secret.text
        place = secret.json()["environment"]
        assert (await ml.post(f"environments/{place}/snapshot", snapshot="s")).status_code == 201
        own = await team.post("environments", environment="ml.e", memory_mib=8)
        assert own.status_code == 201 and own.json()["environment"] != place
        for call in (team.post(f"environments/{place}/snapshot", snapshot="z"),
                     team.delete(f"environments/{place}"),
                     team.post("actions", command=["true"], environment=place)):  # fmt: skip
            assert (await call).status_code == 404
        stolen = await team.post("environments", snapshot="ml.s", memory_mib=8)
        assert stolen.status_code == 404, stolen.text
        taken = f"environments/{own.json()['environment']}/snapshot"
        assert (await team.post(taken, snapshot="ml.s")).status_code == 201  # one of its own
        kept = worker.snapshots.names()
        assert len(kept) == 2
        assert (await ml.post("environments", snapshot="s", memory_mib=8)).status_code == 201
        began = [one.snapshot for one in worker.told if getattr(one, "snapshot", None)]
        assert began == [snapshot_id(ML, "s")]
        again = await ml.post(f"environments/{place}/snapshot", snapshot="s")
        assert again.status_code == 400 and "'s' exists already" in again.text

    with_two(tmp_path, work)


def test_snapshots_keep_their_owner_over_a_restart(tmp_path: Path) -> None:
    async def before(worker: PaperWorker, team: Caller, ml: Caller) -> None:
        place = (await ml.post("environments", memory_mib=8)).json()["environment"]
        assert (await ml.post(f"environments/{place}/snapshot", snapshot="s")).status_code == 201
        (tmp_path / "snapshots" / "team.ml.old").mkdir()  # of version 0.1: nobody knows whose
        (tmp_path / "snapshots" / "team.old").mkdir()

    async def after(worker: PaperWorker, team: Caller, ml: Caller) -> None:
        async def begins(caller: Caller, snapshot: str) -> int:
            answer = await caller.post("environments", snapshot=snapshot, memory_mib=8)
            return answer.status_code

        assert await begins(ml, "s") == 201
        assert await begins(team, "ml.s") == 404
        assert await begins(team, "old") == 201
        assert await begins(ml, "old") == await begins(team, "ml.old") == 404

    with_two(tmp_path, before)
    with_two(tmp_path, after)


def test_sessions_models_runs_and_checkpoints_are_their_tenants_own(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        ml = {"x-api-key": plane.tenants.key_of("team.ml")}
        opened = await client.post("create_session", json={"sdk_version": "0"}, headers=ml)
        session = opened.json()["session_id"]
        sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = await client.post("create_sampling_session", json=sampling, headers=ml)
        assert sampler.status_code == 200, sampler.text
        name = sampler.json()["sampling_session_id"]
        assert (await client.get(f"samplers/{name}", headers=ml)).status_code == 200
        assert (await client.get(f"samplers/{name}")).status_code == 404
        assert (await client.get(f"sessions/{session}")).status_code == 404
        assert (await client.post("create_sampling_session", json=sampling)).status_code == 404
        assert (await client.get("sessions")).json()["sessions"] == []
        assert await post(client, "create_session", sdk_version="0")

    with_plane(tmp_path, work, tenants=("team", "team.ml"))


def test_stores_refuse_to_overwrite_what_is_another_tenants(tmp_path: Path) -> None:
    def checkpoint(tenant: TenantId, held_as: str) -> Checkpoint:
        return Checkpoint(
            path="tinker://m/weights/half",
            tenant=tenant,
            model=ModelId("m"),
            kind="weights",
            name="half",
            base_model="tiny",
            lora=LoraShape(4),
            held_as=held_as,
            lineage="l",
            size_bytes=1,
            created_s=1.0,
            expires_s=None,
            public=False,
            user_metadata=None,
        )

    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        file = JobFile(name="run", model="tiny", command=("true",), iterations=1)
        job = JobId("team.ml/run")
        await plane.store.call(lambda c: add_job(c, job, ML, file))
        with pytest.raises(NotFoundError):
            await plane.store.call(lambda c: add_job(c, job, TEAM, file))
        await plane.store.call(lambda c: put_checkpoint(c, checkpoint(ML, "held-1")))
        with pytest.raises(NotFoundError):
            await plane.store.call(lambda c: put_checkpoint(c, checkpoint(TEAM, "held-2")))
        replacing = checkpoint(ML, "held-3")
        await plane.store.call(lambda c: put_checkpoint(c, replacing))
        path = replacing.path
        found = await plane.store.call(lambda c: find_checkpoint(c, ML, path, now_s=0.0))
        assert found.held_as == "held-3"

    with_plane(tmp_path, work, tenants=("team", "team.ml"))


def test_jobs_of_keys_are_read_back_exactly(tmp_path: Path) -> None:
    tenants = Tenants.open(StateDirectory(tmp_path), ["team", "team.ml"])
    for tenant in (TEAM, ML):
        key = tenants.job_key(tenant, "run")
        assert (tenants.find_by_key(key), tenants.job_of_key(key)) == (tenant, "run")
    forged = tenants.job_key(TEAM, "run").replace("tml-job:team:", "tml-job:team.ml:")
    assert tenants.find_by_key(forged) is None
    with pytest.raises(ConfigError, match="colon"):
        tenants.job_key(TEAM, "a:b")


@pytest.mark.parametrize("name", ["a:b", "a/b", "a@b", "..", ""])
def test_a_tenant_whose_name_could_be_read_two_ways_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--tenant"):
        Tenants.open(StateDirectory(tmp_path), [name])
    StateDirectory(tmp_path).keys_file.write_text(json.dumps({"tml-k": name}))
    with pytest.raises(ConfigError, match="keys file"):
        Tenants.open(StateDirectory(tmp_path), ["team"])
