"""Where a figure was measured."""

import os
import platform
import subprocess
from pathlib import Path


def machine() -> dict[str, object]:
    """The machine in a few words: architecture, cores, Python."""
    return {
        "arch": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count() or 1,
        "python": platform.python_version(),
    }


def commit() -> str:
    """The checkout's commit, with `-dirty` if it was changed; `unknown` outside a checkout."""
    here = Path(__file__).resolve().parent
    command = [
        "git",
        "-C",
        str(here),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else "unknown"
