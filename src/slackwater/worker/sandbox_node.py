"""What this machine has for actions: cores by NUMA node, and memory."""

import os
import tempfile
from pathlib import Path

from slackwater.model.errors import ConfigError

_NODES = Path("/sys/devices/system/node")
_SHARE_FOR_ENVIRONMENTS = 0.8


def parse_cores(text: str) -> set[int]:
    """`0-3,8` as numbers."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        try:
            found.update(range(int(first), int(last if dash else first) + 1))
        except ValueError:
            raise ConfigError.of(
                "--cores", text, "must be numbers and ranges, such as 0-3,8"
            ) from None
    return found


def parse_share(text: str) -> tuple[int, int]:
    """`1/2`: the second of two."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and int(number) < int(count)):
        raise ConfigError.of("--share", text, "must be NUMBER/COUNT, such as 0/2")
    return int(number), int(count)


def cores_by_numa(
    wanted: str, share: tuple[int, int] = (0, 1), nodes: Path = _NODES
) -> list[list[int]]:
    """This worker's share of the (wanted) cores, by NUMA node."""
    allowed = set(os.sched_getaffinity(0))
    if wanted:
        asked = parse_cores(wanted)
        if not asked <= allowed:
            raise ConfigError.of("--cores", wanted, f"must be of this machine's: {sorted(allowed)}")
        allowed = asked
    number, count = share
    allowed = set(sorted(allowed)[number::count])
    if not allowed:
        raise ConfigError.of("--share", f"{number}/{count}", "leaves this worker no core")
    found = []
    for folder in sorted(nodes.glob("node[0-9]*")):
        text = (folder / "cpulist").read_text().strip()
        if text and (cores := sorted(parse_cores(text) & allowed)):
            found.append(cores)
            allowed -= set(cores)
    return [*found, sorted(allowed)] if allowed else found


def memory_mib(share: tuple[int, int] = (0, 1)) -> int:
    """Most of the machine's memory; the rest is the system's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total * _SHARE_FOR_ENVIRONMENTS) // share[1] >> 20


def folder_for_all(service: str) -> Path:
    """Default folder of environments, outside root's home, which other users cannot enter."""
    if os.getuid() == 0:
        return Path("/var/tmp") / f"slackwater-{service}"
    return Path(tempfile.gettempdir()) / f"slackwater-{os.getuid()}-{service}"
