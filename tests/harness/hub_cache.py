"""A Hugging Face hub cache on disk, laid out as `huggingface_hub` does, with a model in it."""

import hashlib
from pathlib import Path


def put_in_hub_cache(home: Path, name: str, model: Path) -> Path:
    """Store a model directory as ORG/NAME in the cache of `HF_HOME=home`; returns its snapshot.

    Blobs are named by their digest, a snapshot links to them, and `refs/main` names the snapshot.
    """
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    files = {file.name: file.read_bytes() for file in sorted(model.iterdir()) if file.is_file()}
    commit = hashlib.sha1(b"".join(files.values())).hexdigest()
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        digest = hashlib.sha256(content).hexdigest()
        (repository / "blobs" / digest).write_bytes(content)
        (snapshot / file).symlink_to(Path("../../blobs") / digest)
    (repository / "refs" / "main").write_text(commit)
    return snapshot
