"""Models by URI, over the control plane's disk or its depot: what is not there, or changes under us, is refused by name."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slackwater.model.errors import NotFoundError, SlackwaterError, UnavailableError
from slackwater.model.uri import Uri
from slackwater.runtime.net.depot import Depot
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.worker.depot_client import DepotClient
from slackwater.worker.files import DepotFiles, NodeFiles, SharedFiles

SECRET = "fleet secret"


@contextlib.contextmanager
def depot_of(root: Path, models: dict[str, Path]) -> Iterator[str]:
    """A real one, on a loop of its own; its address."""
    loop = asyncio.new_event_loop()
    serving = threading.Thread(target=loop.run_forever)
    serving.start()
    depot = Depot(root, models, SECRET)
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
    with depot_of(root, models) as url:
        yield DepotFiles(DepotClient(url, SECRET, None), tmp_path / "node"), models["one"]


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
    with depot_of(tmp_path / "state", models) as url:
        client = Changing(url, SECRET, None)
        client.directory = models["one"]
        with pytest.raises(SlackwaterError, match="models/one: its files changed"):
            DepotFiles(client, tmp_path / "node").model("slackwater:models/one")
    kept = [path for path in (tmp_path / "node" / "models").iterdir() if path.is_dir()]
    assert kept == []


def test_a_node_with_a_wrong_secret_gets_nothing(tmp_path: Path) -> None:
    with depot_of(tmp_path / "state", models_in(tmp_path)) as url:
        files = DepotFiles(DepotClient(url, "guessed", None), tmp_path / "node")
        with pytest.raises(UnavailableError, match="the fleet's secret is wrong"):
            files.model("slackwater:models/one")
