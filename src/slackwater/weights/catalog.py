"""Weight versions in a folder: one checked tensor file each. Loads no tensor library."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from slackwater.model.errors import NotFoundError
from slackwater.model.uri import VERSION_SUFFIX, digest_file, part_of, version_file
from slackwater.tensors.header import TensorHeader, read_header

_PART = re.compile(r"#\d+of\d+$")


def parts_of(version: str, meta: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a version's parts; empty if its own file holds the tensors."""
    ranks = int(meta.get("parts", 0))
    return tuple(part_of(version, rank, ranks) for rank in range(ranks))


class VersionCatalog:
    """The versions in a folder, immutable once visible: list, inspect, drop.

    A sharded trainer's version is a file without tensors, written last, beside one file per rank.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def path(self, version: str) -> Path:
        """The path of a version's file, which may not exist."""
        return self._root / version_file(version)

    def paths(self, version: str) -> tuple[Path, ...]:
        """The files that hold a version: its own, or one per rank that wrote it."""
        path = self.path(version)
        parts = parts_of(version, self.meta(version)) if path.is_file() else ()
        return tuple(map(self.path, parts)) or (path,)

    def versions(self) -> tuple[str, ...]:
        files = (path.name for path in self._root.glob(f"*{VERSION_SUFFIX}"))
        names = (unquote(name.removesuffix(VERSION_SUFFIX)) for name in files if name[0] != ".")
        return tuple(sorted(name for name in names if not _PART.search(name)))

    def present(self, version: str) -> Path:
        """The version's file, or an error that lists existing versions."""
        path = self.path(version)
        if not path.is_file():
            held = ", ".join(self.versions()[-5:]) or "none"
            raise NotFoundError(f"version: {version!r} is not in {self._root}; it holds {held}")
        return path

    def manifest(self, version: str) -> TensorHeader:
        return read_header(self.present(version))

    def meta(self, version: str) -> Mapping[str, Any]:
        return self.manifest(version).meta

    def drop(self, version: str) -> None:
        """Delete one version; a reader that has its file open keeps it."""
        path = self.path(version)
        begins = f"{path.stem}%23"  # "#", before the number of a part
        files = [part for part in self._root.iterdir() if part.name.startswith(begins)]
        for part in (path, *(part for part in files if part.suffix == path.suffix)):
            part.unlink(missing_ok=True)
            digest_file(part).unlink(missing_ok=True)
