"""Folders of files that must not change while somebody relies on them."""

import contextlib
import hashlib
import json
from pathlib import Path


def fingerprint(folder: Path) -> str:
    """Changes when a file of the folder is added, removed, resized or written."""
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for file in sorted(folder.iterdir()):
            if file.is_file():
                stat = file.stat()
                rows.append((file.name, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def changed(uri: object) -> str:
    """What is said of a model whose folder is not as it was when the service started."""
    return f"{uri}: its files changed while the service runs; restart the service to use them"
