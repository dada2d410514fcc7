"""Jobs over HTTP: who names one, whose is whose, and what outlives a restart."""

from pathlib import Path
from typing import Any

import httpx
from test_app import post

from harness.service_plane import with_plane
from slackwater.control.jobs.events import JobTrained
from slackwater.model.ids import JobId, TenantId
from slackwater.runtime.plane import ControlPlane


async def listed(client: httpx.AsyncClient, key: str | None = None) -> dict[str, Any]:
    headers = {} if key is None else {"x-api-key": key}
    answer = await client.get("http://test/slackwater/jobs", headers=headers)
    return {row["job"]: row for row in answer.json()["jobs"]}


async def opened(client: httpx.AsyncClient, job: str | None = None, **body: Any) -> str:
    headers = {} if job is None else {"X-Slackwater-Job": job}
    answer = await client.post("create_session", json={"sdk_version": "0", **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    session: str = answer.json()["session_id"]
    return session


def test_a_session_is_a_job_unless_it_names_one(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        alone = await opened(client)
        await opened(client, "run-1")
        await opened(client, user_metadata={"slackwater_job": "run-1"})
        found = await listed(client)
        assert set(found) == {alone, "mine/run-1"}
        assert found[alone]["stage"] == "placed"

    with_plane(tmp_path, work)


def test_a_name_that_cannot_be_one_is_refused_in_one_line(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        for body, headers in (
            ({}, {"X-Slackwater-Job": "a b"}),
            ({"user_metadata": {"slackwater_job": 7}}, {}),
        ):
            answer = await client.post(
                "create_session", json={"sdk_version": "0", **body}, headers=headers
            )
            assert answer.status_code == 422
            assert "must be 1-64 letters" in answer.text
        assert await listed(client) == {}

    with_plane(tmp_path, work)


def test_a_job_ends_with_the_last_of_its_sessions_as_its_client_says(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        first, second = await opened(client, "run"), await opened(client, "run")
        ends = {"reason": {"type": "success"}}
        await client.post(f"sessions/{first}/finish", json=ends)
        assert (await listed(client))["mine/run"]["stage"] == "placed"
        await client.post(f"sessions/{second}/finish", json=ends)
        assert (await listed(client))["mine/run"]["stage"] == "finished"

    with_plane(tmp_path, work)


def test_others_jobs_are_not_shown_but_to_the_operator(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        other = plane.tenants.key_of("other")
        body = {"sdk_version": "0"}
        await client.post("create_session", json=body, headers={"x-api-key": other})
        await opened(client, "run")
        assert len(await listed(client)) == 2  # the first tenant runs the service
        assert [row["tenant"] for row in (await listed(client, other)).values()] == ["other"]

    with_plane(tmp_path, work)


def test_an_account_outlives_a_restart_and_is_in_the_metrics(tmp_path: Path) -> None:
    async def before(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        await opened(client, "run")
        plane.rollout.feed(JobTrained(0.0, JobId("mine/run"), 2.5, 0.5))

    async def after(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        await plane.jobs.adopt(0.0, {})
        row = (await listed(client))["mine/run"]
        assert (row["trainer_s"], row["operations"]) == (2.5, 1)
        text = (await client.get("http://test/metrics")).text
        assert 'slackwater_job_total{job="mine/run",tenant="mine",what="trainer_s"} 2.5' in text

    with_plane(tmp_path, before)
    with_plane(tmp_path, after)


def test_sessions_go_on_as_before(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        session = await opened(client, "run")
        await post(client, "session_heartbeat", session_id=session)

    with_plane(tmp_path, work)


def test_whatever_comes_with_a_jobs_key_belongs_to_the_job(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        key = plane.tenants.job_key(TenantId("mine"), "digits")
        assert plane.tenants.key_of("mine") not in key
        body = {"sdk_version": "0"}
        for headers in ({}, {"X-Slackwater-Job": "another"}):
            sent = {"x-api-key": key, **headers}
            answer = await client.post("create_session", json=body, headers=sent)
            assert answer.status_code == 200, answer.text
        assert set(await listed(client)) == {"mine/digits"}
        for forged in (key[:-1] + "!", key.replace("digits", "other"), "tml-job:mine:digits:"):
            headers = {"x-api-key": forged}
            answer = await client.post("create_session", json=body, headers=headers)
            assert answer.status_code == 401

    with_plane(tmp_path, work)


def test_a_jobs_key_submits_nothing_and_terms_alone_need_no_operator(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        where = "http://test/slackwater/jobs"
        driven = {"name": "x", "model": "tiny", "iterations": 1, "command": ["true"]}
        key = plane.tenants.job_key(TenantId("mine"), "digits")
        answer = await client.post(where, json=driven, headers={"x-api-key": key})
        assert answer.status_code == 400 and "of a job" in answer.text
        other = {"x-api-key": plane.tenants.key_of("other")}
        own = {"name": "theirs", "iterations": 5, "slo": 1.5}
        answer = await client.post(where, json=own, headers=other)
        assert answer.status_code == 201 and answer.json()["stage"] == "placed"
        answer = await client.post(where, json=own | {"slo": 0.5}, headers=other)
        assert answer.status_code == 422 and "slo: 0.5 must be at least 1" in answer.text

    with_plane(tmp_path, work)
