"""Finds models: in the models' folder, and in the Hugging Face hub with its cache. No PyTorch."""

import json
import math
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slackwater.model.errors import ConfigError, SlackwaterError, UnavailableError
from slackwater.nets.config import NetConfig, weight_files

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
# Files of engines, trainers and tokenizers, without other frameworks' weights.
_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
_UNWANTED = ("*/*", "consolidated*")
_LONGEST_HEADER = 100 << 20


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine: its name, folder and parameters, or why it cannot be used."""

    name: str
    directory: Path
    parameters: int = 0
    problem: str = ""


def models_directory(given: Path | None = None) -> Path:
    """The models' folder: the given one, SLACKWATER_MODELS, or the user's cache."""
    if given is not None:
        return given
    if "SLACKWATER_MODELS" in os.environ:
        return Path(os.environ["SLACKWATER_MODELS"])
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "slackwater" / "models"


def is_model(directory: Path) -> bool:
    """Whether the folder holds a complete model."""
    return (directory / "config.json").is_file() and (directory / "tokenizer.json").is_file()


def is_hub_name(name: str) -> bool:
    """Whether the name has the form ORG/NAME or ORG/NAME@REVISION."""
    return _HUB_NAME.fullmatch(name) is not None


def hub_snapshot(name: str) -> Path:
    """The folder of ORG/NAME in the hub's cache, downloaded if it is not there.

    HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they always do.
    """
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, _, revision = name.partition("@")
    try:
        folder = snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
            local_files_only=constants.HF_HUB_OFFLINE,  # else a commit is asked for at the hub
        )
    except GatedRepoError:
        fix = "asks for its licence to be accepted; do so at the hub and set HF_TOKEN"
        raise ConfigError.of("model", name, fix) from None
    except RevisionNotFoundError:
        raise ConfigError.of("model", name, "has no such revision at the hub") from None
    except (RepositoryNotFoundError, HFValidationError):
        fix = "is not at the hub; check its name, or set HF_TOKEN if it is private"
        raise ConfigError.of("model", name, fix) from None
    except LocalEntryNotFoundError:
        raise ConfigError.of("model", name, _explain_missing()) from None
    except (OSError, httpx.HTTPError) as error:
        reason = str(error).partition("\n")[0]
        raise UnavailableError(f"model: {name!r} cannot be downloaded: {reason}") from None
    return Path(folder)


def _explain_missing() -> str:
    from huggingface_hub import constants

    cache = constants.HF_HUB_CACHE
    if constants.HF_HUB_OFFLINE:
        return f"is not in the hub's cache {cache}; unset HF_HUB_OFFLINE to download it"
    return f"is not in the hub's cache {cache}, and the hub cannot be reached"


def find_models(folder: Path) -> list[StoredModel]:
    """Every model in the models' folder and in the hub's cache, by name."""
    own = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [describe_model(place.name, place) for place in own if is_model(place)]
    return found + [describe_model(name, place) for name, place in sorted(_find_snapshots())]


def _find_snapshots() -> Iterator[tuple[str, Path]]:
    from huggingface_hub import constants

    for repository in Path(constants.HF_HUB_CACHE).glob("models--*"):
        reference = repository / "refs" / "main"
        if reference.is_file():
            snapshot = repository / "snapshots" / reference.read_text().strip()
            if (snapshot / "config.json").is_file():
                yield repository.name.removeprefix("models--").replace("--", "/"), snapshot


def describe_model(name: str, directory: Path) -> StoredModel:
    """A model directory's description, read from its headers."""
    try:
        NetConfig.from_directory(directory)
        parameters = sum(map(_parameters, weight_files(directory)))
    except SlackwaterError as error:
        return StoredModel(name, directory, problem=str(error))
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        reason = f"{directory} cannot be read: {type(error).__name__} {error}"
        return StoredModel(name, directory, problem=reason)
    return StoredModel(name, directory, parameters)


def _parameters(file: Path) -> int:
    return sum(math.prod(entry["shape"]) for entry in _whole_header(file).values())


def _whole_header(file: Path) -> dict[str, dict[str, list[int]]]:
    """Every tensor's entry in a safetensors file; refuses a truncated file."""
    if not file.is_file():
        raise ConfigError.of("model file", str(file), "is missing; safetensors are needed")
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > min(size, _LONGEST_HEADER):
            raise ConfigError.of(
                "model file", str(file), f"is cut off at {size} bytes, or no safetensors"
            )
        header: dict[str, dict[str, list[int]]] = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    whole = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size < whole:
        raise ConfigError.of(
            "model file", str(file), f"is cut off: {size} bytes of {whole}; get it again"
        )
    return header
