"""Detection of changes in folders of files that must not change while in use."""

import contextlib
import hashlib
import json
from pathlib import Path


def fingerprint(folder: Path) -> str:
    """A digest that changes when a file of the folder is added, removed, resized or written."""
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for file in sorted(folder.iterdir()):
            if file.is_file():
                stat = file.stat()
                rows.append((file.name, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def describe_change(uri: object) -> str:
    """The error for a model whose folder changed after the service started."""
    return f"{uri}: its files changed while the service runs; restart the service to use them"
