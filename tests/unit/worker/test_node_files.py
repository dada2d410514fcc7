"""Models by URI, over the control plane's disk or its depot: what is not there, or changes under
us, is refused by name.
"""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import ClassVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

from slackwater.model.errors import NotFoundError, SlackwaterError, UnavailableError
from slackwater.model.ids import NodeId, WorkerId
from slackwater.model.uri import Uri, part_of, version_uri
from slackwater.runtime.launch.launch_plan import LaunchPlan
from slackwater.runtime.launch.node_keys import NodeKeys
from slackwater.runtime.launch.port import WorkerPlan
from slackwater.runtime.net.depot import Depot
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.weights.plan.layout import Layout
from slackwater.weights.plan.shard_map import Box, ShardMap
from slackwater.weights.plan.transfer import plan_publishing
from slackwater.wire import messages
from slackwater.worker.files import DepotClient, DepotFiles, NodeFiles, SharedFiles, WeightStore

WORKER = WorkerId("engine.1")


def planned(folder: Path) -> tuple[LaunchPlan, str]:
    """A launch plan with one worker, which was told to use two models, and its key."""
    plan = LaunchPlan(NodeKeys(StateDirectory(folder)))
    models = [f"slackwater:models/{name}" for name in ("one", "two", "nobody")]
    return plan, plan.expect(NodeId("a"), WorkerPlan("engine", "m", tuple(models)), WORKER)


@contextlib.contextmanager
def depot_of(root: Path, models: dict[str, Path], plan: LaunchPlan) -> Iterator[str]:
    """A real one, on a loop of its own; its address."""
    loop = asyncio.new_event_loop()
    serving = threading.Thread(target=loop.run_forever)
    serving.start()
    depot = Depot(root, models, plan)
    try:
        asyncio.run_coroutine_threadsafe(depot.start("127.0.0.1", 0, None), loop).result(30)
        yield f"http://127.0.0.1:{depot.port}"
    finally:
        asyncio.run_coroutine_threadsafe(depot.close(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        serving.join(30)
        loop.close()


def models_in(folder: Path) -> dict[str, Path]:
    made = {}
    for name in ("one", "two"):
        directory = folder / "models" / name
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(f"{{{name}}}")
        (directory / "weights").write_bytes(name.encode() * 1000)
        made[name] = directory
    return made


@pytest.fixture(params=["shared", "depot"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[NodeFiles, Path]]:
    """A node's files, with or without the control plane's disk, and the folder of model `one`."""
    models, root = models_in(tmp_path), tmp_path / "state"
    if request.param == "shared":
        StateDirectory(root).write_models(models)
        yield SharedFiles(root), models["one"]
        return
    plan, key = planned(root)
    with depot_of(root, models, plan) as url:
        yield DepotFiles(DepotClient(url, key, None), tmp_path / "node"), models["one"]


def test_a_model_is_found_by_its_uri(place: tuple[NodeFiles, Path]) -> None:
    files, _ = place
    found = files.model("slackwater:models/one")
    assert (found / "weights").read_bytes() == b"one" * 1000


def test_a_model_that_does_not_exist_is_named_in_one_line(place: tuple[NodeFiles, Path]) -> None:
    files, _ = place
    with pytest.raises(NotFoundError) as error:
        files.model("slackwater:models/nobody")
    assert "slackwater:models/nobody" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("change", ["written", "added", "removed"])
def test_a_model_that_changes_under_us_is_refused_by_name_and_others_go_on(
    place: tuple[NodeFiles, Path], change: str
) -> None:
    files, directory = place
    files.model("slackwater:models/one")
    match change:
        case "written":
            (directory / "weights").write_bytes(b"new" * 1000)
        case "added":
            (directory / "more").write_bytes(b"")
        case _:
            (directory / "config.json").unlink()
    with pytest.raises(SlackwaterError) as error:
        files.model("slackwater:models/one")
    assert "models/one: its files changed while the service runs" in str(error.value)
    assert "\n" not in str(error.value)
    assert (files.model("slackwater:models/two") / "weights").is_file()


class Changing(DepotClient):
    """Something writes into the model's folder after its first file has gone out."""

    directory: Path

    def fetch(self, uri: Uri, name: str | None, target: Path) -> None:
        super().fetch(uri, name, target)
        (self.directory / "weights").write_bytes(b"torn")


def test_a_model_that_changes_while_it_is_fetched_leaves_nothing_behind(tmp_path: Path) -> None:
    models = models_in(tmp_path)
    plan, key = planned(tmp_path / "state")
    with depot_of(tmp_path / "state", models, plan) as url:
        client = Changing(url, key, None)
        client.directory = models["one"]
        with pytest.raises(SlackwaterError, match="models/one: its files changed"):
            DepotFiles(client, tmp_path / "node").model("slackwater:models/one")
    kept = [path for path in (tmp_path / "node" / "models").iterdir() if path.is_dir()]
    assert kept == []


def test_a_model_whose_kept_files_were_written_to_is_fetched_again(tmp_path: Path) -> None:
    models = models_in(tmp_path)
    plan, key = planned(tmp_path / "state")
    with depot_of(tmp_path / "state", models, plan) as url:
        node = tmp_path / "node"
        kept = DepotFiles(DepotClient(url, key, None), node).model("slackwater:models/one")
        (kept / "weights").write_bytes(b"torn")
        again = DepotFiles(DepotClient(url, key, None), node).model("slackwater:models/one")
        assert (again / "weights").read_bytes() == b"one" * 1000
        before = (again / "weights").stat().st_ino
        DepotFiles(DepotClient(url, key, None), node).model("slackwater:models/one")
        assert (again / "weights").stat().st_ino == before, "fetched once, kept since"


WEIGHTS = {"layer": torch.arange(4096, dtype=torch.float32), "bias": torch.ones(3)}


def damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    match how:
        case "flipped":
            data[-100] ^= 1
        case "cut":
            del data[-100:]
        case "header":
            data[8:40] = b"?" * 32
        case _:
            data.clear()
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("how", ["flipped", "cut", "header", "empty"])
def test_a_kept_version_that_is_damaged_is_dropped_and_pulled_again(
    tmp_path: Path, how: str
) -> None:
    plan, key = planned(tmp_path / "state")
    plan.authorize(WORKER, messages.PublishWeights(1, "m", "v:1"))
    plan.authorize(WORKER, messages.PullVersion("v:1"))
    with depot_of(tmp_path / "state", {}, plan) as url:
        DepotFiles(DepotClient(url, key, None), tmp_path / "trainer").weights().publish(
            "v:1", WEIGHTS, {"step": 1}
        )

        def restarted() -> WeightStore:
            """As an agent and its workers start over what the node kept."""
            return DepotFiles(DepotClient(url, key, None), tmp_path / "node").weights()

        restarted().pull("v:1")
        (kept,) = (tmp_path / "node" / "weights").glob("*.safetensors")
        damaged(kept, how)
        assert restarted().manifest("v:1").meta == {"step": 1}
        found = restarted().pull("v:1")
        assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


def test_a_version_is_published_again_over_a_kept_one_that_is_damaged(tmp_path: Path) -> None:
    """A trainer that comes back replays what it did: the same version, with the same bytes."""
    plan, key = planned(tmp_path / "state")
    plan.authorize(WORKER, messages.PullVersion("v:1"))
    with depot_of(tmp_path / "state", {}, plan) as url:
        for how in ("header", "flipped"):
            store = DepotFiles(DepotClient(url, key, None), tmp_path / "node").weights()
            plan.authorize(WORKER, messages.PublishWeights(1, "m", "v:1"))
            store.publish("v:1", WEIGHTS, {})
            (kept,) = (tmp_path / "node" / "weights").glob("*.safetensors")
            damaged(kept, how)
            plan.authorize(WORKER, messages.PublishWeights(2, "m", "v:1"))
            store.publish("v:1", WEIGHTS, {})
        elsewhere = DepotFiles(DepotClient(url, key, None), tmp_path / "other").weights()
        assert torch.equal(elsewhere.pull("v:1")["layer"], WEIGHTS["layer"])


NET = {
    "model.embed_tokens.weight": (487, 256),
    "model.layers.0.self_attn.q_proj.weight": (512, 256),
    "model.layers.0.self_attn.k_proj.weight": (256, 256),
    "model.layers.0.self_attn.o_proj.weight": (256, 512),
    "model.layers.0.mlp.down_proj.weight": (256, 384),
    "model.norm.weight": (256,),
}
HEAD_DIM = 8
SENDERS, RECEIVERS = Layout.parse("dp=4"), Layout.parse("tp=2")


class CountingDepot(DepotClient):
    """Counts the bytes of weights that it fetches, over all clients."""

    fetched: ClassVar[Counter[str]] = Counter()

    def fetch(self, uri: Uri, name: str | None, target: Path) -> None:
        super().fetch(uri, name, target)
        self.fetched[uri.name] += target.stat().st_size


def publish_from_ranks(store: WeightStore, whole: dict[str, torch.Tensor]) -> None:
    """As the ranks of a trainer do: a part each, then the file that makes them a version."""
    slices = plan_publishing(ShardMap(NET, HEAD_DIM, SENDERS))
    for rank in range(SENDERS.ranks):
        mine = {
            each.name: whole[each.tensor][each.box.index_in(Box.whole(NET[each.tensor]))]
            for each in slices
            if each.rank == rank
        }
        assert 0 < sum(map(torch.numel, mine.values())) < sum(map(torch.numel, whole.values()))
        store.publish(part_of("v:1", rank, SENDERS.ranks), mine, {})
    store.publish("v:1", {}, {"parts": SENDERS.ranks})


def test_four_ranks_publish_and_two_fetch_what_they_hold_and_every_file_once(
    tmp_path: Path,
) -> None:
    plan, key = planned(tmp_path / "state")
    trainer = WorkerId("trainer.1")
    ranks = WorkerPlan("trainer", "m", (), layout=str(SENDERS))
    writes = plan.expect(NodeId("b"), ranks, trainer)
    plan.authorize(trainer, messages.PublishWeights(1, "m", "v:1"))
    plan.authorize(WORKER, messages.PullVersion("v:1"))
    drawn = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=drawn) for name, shape in NET.items()}
    held = [ShardMap(NET, HEAD_DIM, RECEIVERS).rank(rank) for rank in range(RECEIVERS.ranks)]
    with depot_of(tmp_path / "state", {}, plan) as url:
        sender = DepotFiles(DepotClient(url, writes, None), tmp_path / "trainer").weights()
        publish_from_ranks(sender, whole)
        plan.authorize(trainer, messages.PublishWeights(2, "m", "v:1"))
        publish_from_ranks(sender, whole)  # as a trainer that is killed and replays

        def pull(rank: int) -> tuple[dict[str, torch.Tensor], int]:
            files = DepotFiles(CountingDepot(url, key, None), tmp_path / "node")
            return files.weights().pull_slices("v:1", held[rank])

        with ThreadPoolExecutor(RECEIVERS.ranks) as pool:
            found = list(pool.map(pull, range(RECEIVERS.ranks)))
    for shards, (tensors, came) in zip(held, found, strict=True):
        assert came == 4 * sum(piece.box.elements for piece in shards.pieces)
        for piece in shards.pieces:
            index = tuple(map(slice, piece.box.start, piece.box.stop))
            assert torch.equal(tensors[piece.tensor], whole[piece.tensor][index])
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "node/weights").glob("*of*")}
    fetched = {name: size for name, size in CountingDepot.fetched.items() if "of" in name}
    assert len(sizes) == SENDERS.ranks and fetched == sizes
    assert sum(sizes.values()) <= 1.05 * sum(4 * tensor.numel() for tensor in whole.values())


def test_a_key_of_no_worker_gets_nothing_and_neither_does_one_whose_process_ended(
    tmp_path: Path,
) -> None:
    plan, key = planned(tmp_path / "state")
    with depot_of(tmp_path / "state", models_in(tmp_path), plan) as url:
        for given in ("guessed", key):
            if given == key:
                plan.forget(WORKER)
            files = DepotFiles(DepotClient(url, given, None), tmp_path / "node")
            with pytest.raises(UnavailableError, match="of no worker that runs"):
                files.model("slackwater:models/one")


def keep(root: Path, uri: str, content: bytes) -> None:
    """The service has a saved state, or a weight version."""
    path = StateDirectory(root).path(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    if uri.endswith(".safetensors"):
        path.write_bytes(content)
    else:
        path.mkdir()
        (path / "state").write_bytes(content)


MINE, FOREIGN = "slackwater:checkpoints/mine/a@1", "slackwater:checkpoints/other/a@1"


def test_a_worker_reads_what_it_was_told_to_use_and_no_other_nodes_checkpoint(
    tmp_path: Path,
) -> None:
    root = tmp_path / "state"
    plan, key = planned(root)
    for uri in (MINE, FOREIGN, str(version_uri("v1")), str(version_uri("v2"))):
        keep(root, uri, uri.encode())
    plan.authorize(WORKER, messages.LoadState(1, "m", MINE, True))
    plan.authorize(WORKER, messages.PullVersion("v1"))
    with depot_of(root, {}, plan) as url:
        client = DepotClient(url, key, None)
        files = DepotFiles(client, tmp_path / "node")
        with files.open_state(MINE) as folder:
            assert (folder / "state").read_bytes() == MINE.encode()
        client.fetch(version_uri("v1"), None, tmp_path / "v1")
        for asked in (
            lambda: client.listing(Uri.parse(FOREIGN)),
            lambda: client.fetch(Uri.parse(FOREIGN), "state", tmp_path / "stolen"),
            lambda: client.fetch(version_uri("v2"), None, tmp_path / "stolen"),
            lambda: client.listing(Uri.parse("slackwater:checkpoints/other")),
        ):
            with pytest.raises(UnavailableError, match="was not told to use it"):
                asked()
    assert not (tmp_path / "stolen").exists()


def test_a_worker_writes_what_it_was_told_to_and_once(tmp_path: Path) -> None:
    root = tmp_path / "state"
    plan, key = planned(root)
    keep(root, FOREIGN, b"theirs")
    (tmp_path / "state.bin").write_bytes(b"ours")
    with depot_of(root, {}, plan) as url:
        client = DepotClient(url, key, None)
        with pytest.raises(UnavailableError, match="was not told to write anything"):
            client.put_folder(Uri.parse(MINE), [tmp_path / "state.bin"])
        plan.authorize(WORKER, messages.SaveState(1, "m", MINE))
        with pytest.raises(UnavailableError, match="was not told to write it"):
            client.put_folder(Uri.parse(FOREIGN), [tmp_path / "state.bin"])
        client.put_folder(Uri.parse(MINE), [tmp_path / "state.bin"])
        with pytest.raises(UnavailableError, match="has written it already"):
            client.put_folder(Uri.parse(MINE), [tmp_path / "state.bin"])
    state = StateDirectory(root)
    assert (state.path(FOREIGN) / "state").read_bytes() == b"theirs"
    assert (state.path(MINE) / "state.bin").read_bytes() == b"ours"


def test_a_version_is_what_its_first_writer_made_of_it(tmp_path: Path) -> None:
    root = tmp_path / "state"
    plan, first = planned(root)
    other = WorkerId("trainer.2")
    second = plan.expect(NodeId("b"), WorkerPlan("trainer", "m", ()), other)
    for worker in (WORKER, other):
        plan.authorize(worker, messages.PublishWeights(1, "m", "v"))
    (tmp_path / "a").write_bytes(b"a" * 100)
    (tmp_path / "b").write_bytes(b"b" * 100)
    digests = [sha256((tmp_path / name).read_bytes()).hexdigest()[:16] for name in ("a", "b")]
    with depot_of(root, {}, plan) as url:
        DepotClient(url, first, None).put_file(version_uri("v"), tmp_path / "a")
        late = DepotClient(url, second, None)
        with pytest.raises(UnavailableError) as error:
            late.put_file(version_uri("v"), tmp_path / "b")
        assert "is published with other bytes" in str(error.value)
        assert all(digest in str(error.value) for digest in digests)
        late.put_file(version_uri("v"), tmp_path / "a")  # the same again is nothing
    kept_file = StateDirectory(root).path(str(version_uri("v")))
    assert kept_file.read_bytes() == b"a" * 100
    assert not list((root / "uploads").iterdir())


def test_a_version_whose_bytes_changed_on_the_service_s_disk_is_not_taken(tmp_path: Path) -> None:
    root = tmp_path / "state"
    plan, key = planned(root)
    plan.authorize(WORKER, messages.PublishWeights(1, "m", "v"))
    plan.authorize(WORKER, messages.PullVersion("v"))
    (tmp_path / "a").write_bytes(b"a" * 100)
    with depot_of(root, {}, plan) as url:
        client = DepotClient(url, key, None)
        client.put_file(version_uri("v"), tmp_path / "a")
        client.fetch(version_uri("v"), None, tmp_path / "fetched")
        assert (tmp_path / "fetched").read_bytes() == b"a" * 100
        StateDirectory(root).path(str(version_uri("v"))).write_bytes(b"x" * 100)
        with pytest.raises(UnavailableError, match="came with sha256"):
            client.fetch(version_uri("v"), None, tmp_path / "again")
        assert not (tmp_path / "again").exists()
        plan.authorize(WORKER, messages.PublishWeights(2, "m", "v"))  # as a replay would
        client.put_file(version_uri("v"), tmp_path / "a")
        client.fetch(version_uri("v"), None, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == b"a" * 100


def test_two_files_committed_as_one_are_refused_in_one_line(tmp_path: Path) -> None:
    root = tmp_path / "state"
    plan, key = planned(root)
    plan.authorize(WORKER, messages.PublishWeights(1, "m", "v"))
    with depot_of(root, {}, plan) as url:
        for name in ("one", "two"):
            put = Request(f"{url}/uploads/abc/{name}", b"x", method="PUT")
            put.add_header("Authorization", f"Bearer {key}")
            urlopen(put, timeout=60).close()
        asked = Request(
            f"{url}/files/weights/{version_uri('v').name}?upload=abc",
            headers={"Authorization": f"Bearer {key}"},
            method="POST",
        )
        with pytest.raises(HTTPError) as refused:
            urlopen(asked, timeout=60)
        said = refused.value.read().decode()
        assert refused.value.code == 400
        assert "2 files as slackwater:weights/v.safetensors" in said
        assert "\n" not in said
        (tmp_path / "a").write_bytes(b"a")  # and it may try again
        DepotClient(url, key, None).put_file(version_uri("v"), tmp_path / "a")
