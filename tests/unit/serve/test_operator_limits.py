"""What the operator lets tenants ask of the sandboxes: refused at the door in one clear line, and
told to the worker."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from paper_worker import Caller, PaperWorker

from harness.service_plane import with_plane
from slackwater.model.config import decode, plain
from slackwater.model.errors import ConfigError
from slackwater.model.tenant_limits import OperatorLimits, TenantLimits
from slackwater.model.toml_text import toml_text
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.settings import ServiceSettings
from slackwater.wire import sandbox

MIB = 1 << 20
Work = Callable[[PaperWorker, Caller, Caller], Awaitable[None]]


def with_limits(folder: Path, work: Work, **table: Any) -> None:
    """`team` runs the service and has the `table`; `guest` has what everybody has."""
    limits = decode(OperatorLimits, table, "limits")

    async def both(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        await plane.actions.adopt()
        worker = PaperWorker(plane, folder)
        await work(worker, Caller(plane, client, "team"), Caller(plane, client, "guest"))

    with_plane(folder, both, tenants=("team", "guest"), sandboxes=1, limits=limits)


ABOVE: dict[str, dict[str, Any]] = {
    "limits.memory_mib": {"limits": {"memory_mib": 101}},
    "limits.disk_mib": {"limits": {"disk_mib": 102}},
    "limits.processes": {"limits": {"processes": 11}},
    "limits.output_bytes": {"limits": {"output_bytes": 1001}},
    "limits.network": {"limits": {"network": True}},
    "cores": {"cores": [1, 3]},
    "limit_s": {"limit_s": 31},
    "priority": {"priority": -6},
}


def test_what_is_above_a_ceiling_names_field_value_ceiling_and_who_sets_it(tmp_path: Path) -> None:
    async def work(worker: PaperWorker, team: Caller, guest: Caller) -> None:
        for field, body in ABOVE.items():
            answer = await guest.post("actions", command=["true"], **body)
            assert answer.status_code == 422, (field, answer.text)
            said = answer.json()["error"]
            assert said.startswith(f"{field}: ") and "the operator" in said and "guest" in said
            assert f"([limits] {field.removeprefix('limits.')})" in said
        too_large = await guest.post("environments", memory_mib=101)
        assert too_large.status_code == 422 and "[limits] memory_mib" in too_large.text
        code = {"code": "", "memory_limit_MB": 101}
        assert (await guest.post("run_code", **code)).status_code == 422
        assert (await guest.post("run_code", code="", run_timeout=31)).status_code == 422
        assert worker.told == []

    with_limits(
        tmp_path,
        work,
        **{"memory_mib": 100, "disk_mib": 101, "processes": 10, "output_bytes": 1000},
        **{"cores": 2, "limit_s": 30.0, "priority": 5},
    )


def test_no_memory_is_no_way_to_have_all_of_it(tmp_path: Path) -> None:
    """An environment of 0 MiB ran 1.5 GiB."""

    async def work(worker: PaperWorker, team: Caller, guest: Caller) -> None:
        for path, body in (
            ("environments", {"memory_mib": 0}),
            ("actions", {"command": ["true"], "limits": {"memory_mib": 0}}),
        ):
            answer = await guest.post(path, **body)
            assert answer.status_code == 422 and "memory_mib" in answer.text
        place = (await guest.post("environments", memory_mib=64)).json()["environment"]
        more = await guest.post(
            "actions", command=["true"], environment=place, limits={"memory_mib": 65}
        )
        assert more.status_code == 422 and "at most 64, the memory of its environment" in more.text
        await guest.post("actions", command=["true"], environment=place)
        await guest.post("actions", command=["true"])
        assert [run.limits.memory_bytes // MIB for run in worker.runs()] == [64, 2048]

    with_limits(tmp_path, work, core_share=1.0)


def test_defaults_are_within_the_ceilings_and_reach_the_worker(tmp_path: Path) -> None:
    async def work(worker: PaperWorker, team: Caller, guest: Caller) -> None:
        await guest.post("actions", command=["true"])
        await team.post("actions", command=["true"], limits={"network": True})
        held, network = (run.limits for run in worker.runs())
        assert (held.wall_s, held.processes, held.output_bytes) == (30.0, 10, 1000)
        assert (held.memory_bytes, held.disk_bytes) == (100 * MIB, 101 * MIB)
        assert not held.network and network.network
        (await guest.post("environments")).raise_for_status()
        (opened,) = (one for one in worker.told if isinstance(one, sandbox.OpenEnvironment))
        assert opened.memory_mib == 100

    with_limits(
        tmp_path,
        work,
        **{"memory_mib": 100, "disk_mib": 101, "processes": 10, "output_bytes": 1000},
        limit_s=30.0,
    )


def test_what_waits_over_a_restart_is_held_to_the_new_ceilings(tmp_path: Path) -> None:
    async def before(worker: PaperWorker, team: Caller, guest: Caller) -> None:
        for _ in range(2):
            await team.post("actions", command=["true"], cores=2, limits={"network": True})

    async def after(worker: PaperWorker, team: Caller, guest: Caller) -> None:
        async with asyncio.timeout(30):
            await worker.started.wait()
        (run,) = worker.runs()
        assert not run.limits.network
        assert run.limits.processes == 10

    shared = {"core_share": 1.0}
    with_limits(tmp_path, before, **shared)
    with_limits(tmp_path, after, **shared, tenants={"team": {"network": False, "processes": 10}})


def test_environments_and_snapshots_are_counted_by_tenant(tmp_path: Path) -> None:
    async def work(worker: PaperWorker, team: Caller, guest: Caller) -> None:
        names = [
            (await guest.post("environments", job=f"j{i}", memory_mib=8)).json() for i in range(2)
        ]
        refused = await guest.post("environments", job="another", memory_mib=8)
        assert refused.status_code == 429 and "[limits] environments" in refused.text
        place = names[0]["environment"]
        snapshot = f"environments/{place}/snapshot"
        assert (await guest.post(snapshot, snapshot="one")).status_code == 201
        full = await guest.post(snapshot, snapshot="two")
        assert full.status_code == 400 and "[limits] snapshots" in full.text
        (await guest.delete(f"environments/{place}")).raise_for_status()
        assert (await guest.post("environments", memory_mib=8)).status_code == 201

    with_limits(tmp_path, work, environments=2, snapshots=1)


def test_snapshots_are_bounded_by_their_bytes_over_a_restart(tmp_path: Path) -> None:
    async def take(worker: PaperWorker, caller: Caller, name: str) -> httpx.Response:
        worker.snapshot_bytes = 5 * MIB
        place = (await caller.post("environments", memory_mib=8)).json()["environment"]
        return await caller.post(f"environments/{place}/snapshot", snapshot=name)

    async def before(worker: PaperWorker, team: Caller, guest: Caller) -> None:
        for name in ("one", "two"):
            assert (await take(worker, guest, name)).status_code == 201
        told = [one.most_bytes for one in worker.told if isinstance(one, sandbox.KeepSnapshot)]
        assert told == [10 * MIB, 5 * MIB]

    async def after(worker: PaperWorker, team: Caller, guest: Caller) -> None:
        full = await take(worker, guest, "three")
        assert full.status_code == 400 and "[limits] snapshot_mib" in full.text
        assert (await take(worker, team, "three")).status_code == 201

    with_limits(tmp_path, before, snapshot_mib=10)
    with_limits(tmp_path, after, snapshot_mib=10)


def test_jobs_invented_by_a_tenant_do_not_lengthen_its_queue(tmp_path: Path) -> None:
    async def work(worker: PaperWorker, team: Caller, guest: Caller) -> None:
        codes = [
            (await guest.post("actions", command=["true"], job=f"j{i}", cores=1)).status_code
            for i in range(5)
        ]
        assert codes == [202] * 4 + [429]  # one runs: the other core is others'
        assert (await team.post("actions", command=["true"])).status_code == 202
        assert len(worker.runs()) == 2

    with_limits(tmp_path, work, tenants={"guest": {"waiting_actions": 3}})


def test_who_is_refused_for_want_of_room_hears_it_after_a_pause(tmp_path: Path) -> None:
    """Or it asks again at once, for as long as it likes, and others pay for it."""

    async def work(worker: PaperWorker, team: Caller, guest: Caller) -> None:
        assert (await guest.post("environments", memory_mib=8)).status_code == 201
        began_s = time.perf_counter()
        many = [
            asyncio.create_task(guest.post("environments", memory_mib=8, job=f"j{n}"))
            for n in range(8)
        ]
        assert (await team.post("environments", memory_mib=8)).status_code == 201
        assert not any(one.done() for one in many)
        assert {one.status_code for one in await asyncio.gather(*many)} == {429}
        assert time.perf_counter() - began_s > 0.5

    with_limits(tmp_path, work, tenants={"guest": {"environments": 1}})


def test_a_table_of_limits_has_defaults_overrides_and_shares() -> None:
    wanted = {"memory_mib": 50, "tenants": {"team.ml": {"weight": 3.0, "cores": 2}}}
    limits = decode(OperatorLimits, wanted, "limits")
    table = limits.table(["op", "team.ml"], "op", 1000)
    ml, op = table.limits_of("team.ml"), table.limits_of("op")  # type: ignore[arg-type]
    assert (ml.memory_mib, ml.weight, ml.cores, ml.network) == (50, 3.0, 2, False)
    assert (op.memory_mib, op.weight, op.network, op.waiting_actions) == (50, 1.0, True, 500)
    assert (op.memory_share, op.core_share) == (0.5, 0.9)
    alone = limits.table(["op"], "op", 1000).limits_of("op")  # type: ignore[arg-type]
    assert (alone.memory_share, alone.core_share, alone.waiting_actions) == (1.0, 1.0, 1000)
    assert [TenantLimits(core_share=0.9).cores_of(n) for n in (1, 2, 4, 64)] == [1, 1, 3, 57]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"memory_mib": 0}, "memory_mib: 0 must be at least 1"),
        ({"weight": 0.0}, "weight: 0.0 must be above 0"),
        ({"core_share": 1.5}, "core_share: 1.5"),
        ({"memory": 5}, "limits.memory: unknown key"),
        ({"tenants": {"a:b": {}}}, "limits.tenants: 'a:b'"),
        ({"tenants": {"team": {"corez": 5}}}, "limits.tenants.team.corez: unknown key"),
        ({"tenants": {"team": {"cores": 0}}}, "limits.tenants.team: cores: 0"),
    ],
)
def test_a_wrong_table_is_refused_with_its_field(table: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        decode(OperatorLimits, table, "limits")
    assert says in str(error.value)


def test_the_limits_are_written_down_with_the_rest_of_the_configuration(tmp_path: Path) -> None:
    import tomllib

    limits = OperatorLimits(memory_mib=50, tenants={"team.ml": {"weight": 3.0}})
    settings = ServiceSettings(state=tmp_path, models={}, sandboxes=1, limits=limits)
    read = decode(ServiceSettings, tomllib.loads(toml_text(plain(settings))))
    assert read.limits == limits
