"""Downloads trained weights from a service, for `slackwater model export`."""

from collections.abc import Callable
from pathlib import Path

from slackwater.cli.preflight import check_folder
from slackwater.cli.running_service import ServiceClient
from slackwater.model.errors import ConfigError
from slackwater.model.folder import partial_folder

Progress = Callable[[str, float], None]
_TEMPORARY_S = 3600


class WeightSource:
    """One service, accessed by one tenant."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key
        self._client = ServiceClient(url, key, timeout_s=60)

    def export(
        self, path: str, out: Path, *, merge: bool, base: Path | None, progress: Progress
    ) -> None:
        """Write the weights of a `tinker://` path to `out`, which must not exist."""
        if out.exists():
            raise ConfigError.of("DIR", str(out), "exists already; name a new folder")
        base_model = self._client.ask("POST", "/api/v1/weights_info", {"tinker_path": path})[
            "base_model"
        ]
        check_folder("DIR", out)
        with partial_folder(out.with_name(f"{out.name}-download")) as folder:
            self._download(path, folder, progress)
            if merge and (folder / "adapter_config.json").is_file():
                from slackwater.zoo.exported import write_merged

                progress("merging", 0.9)
                write_merged(base or self._base_directory(base_model), folder, out)
            else:
                folder.replace(out)
        progress("done", 1.0)

    def _download(self, path: str, folder: Path, progress: Progress) -> None:
        if "/weights/" not in path:
            self._fetch(path, folder, progress)
            return
        # A training state is exported for an hour and then downloaded, as in the SDK's own tools.
        from slackwater.rl.sdk_client import closing, load_sdk

        load_sdk()
        import tinker

        progress("exporting the training state", 0.05)
        with closing(tinker.ServiceClient(base_url=self._url, api_key=self._key)) as service:
            client = service.create_training_client_from_state(path)
            saved = client.save_weights_external("export", ttl_seconds=_TEMPORARY_S).result()
            self._fetch(saved.path, folder, progress)
            rest = service.create_rest_client()
            rest.delete_checkpoint_from_tinker_path(saved.path).result()

    def _fetch(self, path: str, folder: Path, progress: Progress) -> None:
        run, kind, name = path.removeprefix("tinker://").split("/", 2)
        where = f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls"
        urls: dict[str, str] = self._client.ask("GET", where)["urls"]
        for done, (file, url) in enumerate(urls.items()):
            progress(file, 0.1 + 0.75 * done / len(urls))
            with (
                self._client.http.stream("GET", url) as answer,
                (folder / file).open("wb") as target,
            ):
                answer.raise_for_status()
                for part in answer.iter_bytes(1 << 20):
                    target.write(part)

    def _base_directory(self, name: str) -> Path:
        """The base model's folder, if the service runs on this machine."""
        from slackwater.zoo.sources import is_model, models_directory

        models = self._client.ask("GET", "/slackwater/status").get("models", {})
        folders = [Path(str(models[name]))] if isinstance(models, dict) and name in models else []
        for folder in (*folders, models_directory() / name):
            if is_model(folder):
                return folder
        raise ConfigError(f"--base: is required with --merge: the folder of {name}")
