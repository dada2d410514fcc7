"""Processor time of processes that a bench started, from Linux' own books."""

import os
from pathlib import Path


def started_by(pid: int) -> list[int]:
    """A process' children, and theirs; each thread has children of its own."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in file.read_text().split():
            found += [int(child), *started_by(int(child))]
    return found


def used_cpu_s(pid: int) -> float:
    """Seconds so far; 0 of a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
