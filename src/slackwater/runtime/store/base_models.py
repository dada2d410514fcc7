"""Base models on disk: their facts, read without loading the weights."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from slackwater.model.errors import ConfigError, NotFoundError
from slackwater.model.uri import Uri


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A Hugging Face directory under a name."""

    name: str
    directory: Path
    vocab_size: int
    max_context_tokens: int
    stop_token_ids: tuple[int, ...]
    architecture: str

    @property
    def version(self) -> str:
        """The weight version of the base model itself."""
        return f"base:{self.name}"

    @property
    def max_text_chars(self) -> int:
        """A longer text cannot fit: tokens rarely have more than sixteen characters."""
        return 16 * self.max_context_tokens + 1024

    @property
    def uri(self) -> str:
        """The same on every node."""
        return str(Uri("models", quote(self.name, safe="")))

    def room_after(self, prompt: Sequence[int]) -> int:
        """How many tokens may follow a prompt; refuses one that is empty, invalid or too long."""
        self.check_length(prompt)
        if max(prompt) >= self.vocab_size:
            raise ConfigError.of("prompt: token", max(prompt), f"must be below {self.vocab_size}")
        return self.max_context_tokens - len(prompt)

    def check_length(self, prompt: Sequence[int]) -> None:
        """Refuse a prompt that is empty or leaves no room, before any time is spent on it."""
        if not len(prompt):
            raise ConfigError.of("prompt", "[]", "must hold at least one token")
        if len(prompt) >= self.max_context_tokens:
            fix = f"must be below {self.max_context_tokens}"
            raise ConfigError.of("prompt", f"{len(prompt)} tokens", fix)

    @classmethod
    def read(cls, name: str, directory: Path) -> "BaseModel":
        """From `config.json`; `generation_config.json` may name more end tokens."""
        directory = directory.expanduser().resolve()
        config = _json(directory / "config.json")
        if config is None:
            raise ConfigError.of(
                f"model {name}", str(directory), "must be a directory with a config.json"
            )
        try:
            return cls(
                name=name,
                directory=directory,
                vocab_size=int(config["vocab_size"]),
                max_context_tokens=int(config.get("max_position_embeddings", 2048)),
                stop_token_ids=_stop_token_ids(directory, config),
                architecture=str(config.get("model_type", "unknown")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError.of(
                f"model {name}: config.json", str(error), "is missing or wrong"
            ) from error


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError.of("model file", str(path), f"cannot be read: {error}") from None
    return found if isinstance(found, dict) else None


def _stop_token_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    found: set[int] = set()
    for source in (config, _json(directory / "generation_config.json") or {}):
        ids = source.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(found))


class BaseModels:
    """The models that this service offers; a model may also be named by its directory."""

    def __init__(self, models: Mapping[str, BaseModel], *, or_none: bool = False) -> None:
        if not models and not or_none:
            raise ConfigError.of("--model", "none", "must name at least one: [NAME=]MODEL")
        self._by_name = dict(models)
        self._by_directory = {str(model.directory): model for model in models.values()}

    def __iter__(self) -> Iterator[BaseModel]:
        return iter(self._by_name.values())

    def directories(self) -> dict[str, Path]:
        """Where each model is on this disk, by the name in its URI."""
        return {Uri.parse(model.uri).name: model.directory for model in self._by_name.values()}

    def get(self, name: str) -> BaseModel:
        model = self._by_name.get(name) or self._by_directory.get(name.rstrip("/"))
        if model is None:
            known = ", ".join(sorted(self._by_name))
            raise NotFoundError(f"model {name!r} is not served here; there are: {known}")
        return model
