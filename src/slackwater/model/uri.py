"""URIs of what a fleet stores: `slackwater:KIND/NAME`, the same on every node.

Kinds: `models` (base models by their name in the service), `weights` (weight versions), `snapshots`
and `checkpoints` (saved training states). Each node resolves a URI through its own files.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import quote

from slackwater.model.errors import ConfigError

SCHEME = "slackwater:"
Kind = Literal["models", "weights", "snapshots", "checkpoints"]
KINDS: tuple[Kind, ...] = get_args(Kind)
VERSION_SUFFIX = ".safetensors"
_PART_FILE = re.compile(r"%23\d+of\d+(?=\.safetensors$)")
_MAX_VERSION_BYTES = 255 - len(".") - len(VERSION_SUFFIX) - len(".partial") - 33


@dataclass(frozen=True, slots=True)
class Uri:
    """The URI of a stored object. `name` has one or more path segments, none empty, `.` or `..`."""

    kind: Kind
    name: str

    def __post_init__(self) -> None:
        segments = self.name.split("/")
        if any(segment in ("", ".", "..") or "\0" in segment for segment in segments):
            raise ConfigError.of("uri", str(self), "must name something: slackwater:KIND/NAME")

    def __str__(self) -> str:
        return f"{SCHEME}{self.kind}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> "Uri":
        kind, slash, name = text.removeprefix(SCHEME).partition("/")
        known = next((each for each in KINDS if each == kind), None)
        if not text.startswith(SCHEME) or not slash or known is None:
            kinds = ", ".join(KINDS)
            raise ConfigError.of("uri", text, f"must be slackwater:KIND/NAME, KIND one of {kinds}")
        return cls(known, name)


def version_file(version: str) -> str:
    name = quote(version, safe="-_:+=@").replace(".", "%2E")
    if not name or len(name.encode()) > _MAX_VERSION_BYTES:
        fix = f"must have 1 to {_MAX_VERSION_BYTES} characters"
        raise ConfigError.of("version", version, fix)
    return f"{name}{VERSION_SUFFIX}"


def digest_file(path: Path) -> Path:
    """Where the control plane stores the SHA-256 of a weight version's file from a node."""
    return path.with_name(f".{path.name}.sha256")


def version_uri(version: str) -> Uri:
    return Uri("weights", version_file(version))


def part_of(version: str, rank: int, ranks: int) -> str:
    """The name of the part of a version that one rank of a sharded trainer publishes."""
    return f"{version}#{rank + 1}of{ranks}"


def whole_uri(uri: str) -> str:
    """The URI of the version that a part belongs to; any other URI itself."""
    return _PART_FILE.sub("", uri)
