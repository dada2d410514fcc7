"""`slackwater bench intruders`: every attack on every backend, as root and as another user.

`succeeded` must be 0. As root the attacks also run in a process of a user without rights, in which
the interpreter is made reachable; each backend that isolates has a service of its own. Without such
a backend a service with several tenants must not start (`started_without_isolation`).
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.intruders.attacks import ATTACKS
from benchmarks.intruders.target import target
from benchmarks.options import BenchOptions
from slackwater.model.errors import SlackwaterError
from slackwater.sandbox import linux
from slackwater.sandbox.backends.bubblewrap import find_bubblewrap
from slackwater.sandbox.backends.docker import DEFAULT_IMAGE, find_docker
from slackwater.sandbox.file_tasks import delete

_USER = 64_777  # nobody's
_LIMIT_S = 1800.0


def run(options: BenchOptions) -> dict[str, object]:
    """Attack as whoever runs this and, as root, as somebody else too."""
    figures: dict[str, object] = {}
    users = {"root": None, "user": _USER} if os.getuid() == 0 else {"user": None}
    for share, (name, user) in enumerate(users.items()):
        options.progress(f"attacks as {name}", share / len(users))
        for backend, found in _campaign(user).items():
            figures |= {f"{name}.{backend}.{attack}": value for attack, value in found.items()}
    values = list(figures.values())
    figures["attacks"] = len(values)
    figures["succeeded"] = sum(value is True for value in values)
    figures["unfinished"] = sum(not isinstance(value, bool) for value in values)
    return figures


def _campaign(user: int | None) -> dict[str, dict[str, object]]:
    command = [sys.executable, "-m", "benchmarks.intruders.campaign", str(user or "")]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_LIMIT_S)
    found: dict[str, dict[str, object]] = json.loads(ended.stdout.splitlines()[-1])
    return found


def backends_here() -> list[str]:
    """Those that isolate and run here."""
    found = []
    if find_bubblewrap(None)[0] is not None:
        found.append("bubblewrap")
    if os.getuid() == 0 and find_docker(DEFAULT_IMAGE)[0] is not None:
        found.append("docker")
    return found


def attacked(backend: str) -> dict[str, object]:
    """Every attack in turn; one that ends with an error says so instead."""
    found: dict[str, object] = {}
    with _scratch() as folder, target(folder, backend) as service:
        for attack in ATTACKS:
            try:
                found[attack.__name__] = attack(service)
            except Exception as error:  # noqa: BLE001  (partial results rather than none)
                found[attack.__name__] = f"{type(error).__name__}: {error}"[:300]
    return found


def started_without_isolation() -> bool:
    """Whether a service with three tenants serves actions where no backend isolates them."""
    with _scratch() as folder:
        os.environ["PATH"] = str(Path(sys.executable).parent)
        try:
            with target(folder, "auto") as service:
                return service.serves()
        except (SlackwaterError, TimeoutError):
            return False


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="slackwater-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:  # it may be thousands of folders deep
        delete(str(folder.parent), folder.name)


def become(user: int) -> None:
    """Be that user, with the interpreter reachable if it lies in a folder of root's alone."""
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    prefix = Path(sys.base_prefix)
    closed = [each for each in reversed(prefix.parents) if not each.stat().st_mode & 0o001]
    if closed:
        kept = Path(tempfile.mkdtemp(dir="/var/tmp"))
        subprocess.run(["mount", "--bind", prefix, kept], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", closed[0]], check=True)
        prefix.mkdir(parents=True)
        subprocess.run(["mount", "--bind", kept, prefix], check=True)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.environ |= {
        "HOME": "/var/tmp",
        "USER": str(user),
        "NUMBA_CACHE_DIR": f"/var/tmp/numba-{user}",
    }


def main() -> None:
    if sys.argv[1]:
        become(int(sys.argv[1]))
    found = {backend: attacked(backend) for backend in backends_here()}
    found["none"] = {"started_without_isolation": started_without_isolation()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
