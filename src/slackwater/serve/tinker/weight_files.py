"""Files of an export: an adapter that peft loads, or a whole model.

With age recipients, as in the Tinker cookbook, every file is encrypted and gets the suffix `.age`.
"""

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pyrage

from slackwater.model.adapter_config import adapter_config
from slackwater.model.errors import ConfigError
from slackwater.runtime.store.base_models import BaseModel
from slackwater.runtime.store.checkpoints import HELD_AS_VERSIONS, Checkpoint
from slackwater.runtime.store.versions import VersionShelf
from slackwater.serve.tinker.tokenizers import tokenizer_files

RECIPIENTS = "age_encryption_recipients"  # in an export's user_metadata, joined by spaces
_SUFFIX = ".age"


def weight_files(
    checkpoint: Checkpoint, base: BaseModel, versions: VersionShelf, folder: Path
) -> dict[str, Path | bytes]:
    """The files of a checkpoint's export by name; files of several ranks are joined in `folder`."""
    if checkpoint.kind not in HELD_AS_VERSIONS:
        raise ConfigError.of(
            "path", checkpoint.path, "must be saved with save_weights_external or _for_sampler"
        )
    parts = versions.paths(checkpoint.held_as)
    file = parts[0]
    if len(parts) > 1:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "joined.safetensors"
        versions.join(checkpoint.held_as, file)
    lora = versions.meta(checkpoint.held_as).get("lora")
    if lora is None:
        return {"model.safetensors": file, **{path.name: path for path in tokenizer_files(base)}}
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
    """Write all files to one tar for older SDKs; `checkpoint_complete` is its last entry."""
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
    """Recipients as stored with the export; refuses invalid keys."""
    for recipient in recipients:
        try:
            pyrage.x25519.Recipient.from_str(recipient)
        except pyrage.RecipientError:
            raise ConfigError.of(RECIPIENTS, recipient, "must be an age public key") from None
    return " ".join(recipients)


def encrypt_files(
    files: dict[str, Path | bytes], recipients_text: str, folder: Path
) -> dict[str, Path | bytes]:
    """Encrypt the files for the recipients; large ones are written to `folder`."""
    recipients = [pyrage.x25519.Recipient.from_str(name) for name in recipients_text.split()]
    folder.mkdir(parents=True, exist_ok=True)
    encrypted: dict[str, Path | bytes] = {}
    for name, content in files.items():
        if isinstance(content, bytes):
            encrypted[name + _SUFFIX] = pyrage.encrypt(content, recipients)
        else:
            target = folder / (name + _SUFFIX)
            pyrage.encrypt_file(str(content), str(target), recipients)
            encrypted[target.name] = target
    return encrypted
