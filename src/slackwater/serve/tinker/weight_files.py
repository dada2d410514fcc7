"""Exports: an adapter that peft loads, or a whole model.

With age recipients, as the Tinker cookbook uses them, every file is encrypted and has the suffix
`.age`.
"""

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pyrage

from slackwater.model.adapter_config import adapter_config
from slackwater.model.errors import ConfigError
from slackwater.runtime.store import checkpoints as shelf
from slackwater.runtime.store.base_models import BaseModel
from slackwater.runtime.store.checkpoints import Checkpoint
from slackwater.runtime.store.versions import VersionShelf

RECIPIENTS = "age_encryption_recipients"  # in an export's user_metadata, joined by spaces
_SUFFIX = ".age"
# What stands beside the weights in a model directory, for text.
_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def weight_files(
    held: Checkpoint, base: BaseModel, versions: VersionShelf, folder: Path
) -> dict[str, Path | bytes]:
    """Every file of a checkpoint's export by name; small ones are made on the spot, and what
    several ranks wrote is joined in the folder.
    """
    if held.kind not in shelf.HELD_AS_VERSIONS:
        raise ConfigError.of(
            "path", held.path, "must be saved with save_weights_external or _for_sampler"
        )
    parts = versions.paths(held.held_as)
    file = parts[0]
    if len(parts) > 1:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "joined.safetensors"
        versions.join(held.held_as, file)
    lora = versions.meta(held.held_as).get("lora")
    if lora is None:
        beside = {name: base.directory / name for name in _TEXT_FILES}
        there = {name: path for name, path in beside.items() if path.is_file()}
        return {"model.safetensors": file, **there}
    config = adapter_config(
        lora["rank"],
        lora["alpha"],
        attn=lora["attn"],
        mlp=lora["mlp"],
        unembed=lora["unembed"],
        base_model=base.name,
    )
    return {
        "adapter_model.safetensors": file,
        "adapter_config.json": json.dumps(config, indent=2).encode(),
    }


def write_archive(
    files: dict[str, Path | bytes], name: str, folder: Path
) -> dict[str, Path | bytes]:
    """All files in one tar, as older SDKs download them; `checkpoint_complete` ends it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / name, "w") as archive:
        for each, content in {**files, "checkpoint_complete": b""}.items():
            if isinstance(content, Path):
                archive.add(content.resolve(), each)
                continue
            entry = tarfile.TarInfo(each)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return {name: folder / name}


def check_recipients(recipients: Sequence[str]) -> str:
    """Recipients as they are kept with the export; a key that is none is refused."""
    for recipient in recipients:
        try:
            pyrage.x25519.Recipient.from_str(recipient)
        except pyrage.RecipientError:
            raise ConfigError.of(RECIPIENTS, recipient, "must be an age public key") from None
    return " ".join(recipients)


def encrypt_files(
    files: dict[str, Path | bytes], kept: str, folder: Path
) -> dict[str, Path | bytes]:
    """The same files for the recipients alone; large ones are written to `folder`."""
    recipients = [pyrage.x25519.Recipient.from_str(name) for name in kept.split()]
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, Path | bytes] = {}
    for name, content in files.items():
        if isinstance(content, bytes):
            made[name + _SUFFIX] = pyrage.encrypt(content, recipients)
        else:
            target = folder / (name + _SUFFIX)
            pyrage.encrypt_file(str(content), str(target), recipients)
            made[target.name] = target
    return made
