"""A PostgreSQL server of its own, which can be stopped, killed and started again."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

_START_S = 60.0


def can_run_postgres() -> bool:
    """Whether PostgreSQL is installed here."""
    return shutil.which("initdb") is not None


class PostgresCluster:
    """It refuses to run as root, so it runs as `postgres` then. `flushed`: commits wait for the
    disk.
    """

    def __init__(self, port: int, *, flushed: bool = False) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="slackwater-postgres-"))
        self._user = "postgres" if os.geteuid() == 0 else None
        if self._user:
            shutil.chown(self._folder, self._user)
        self._port, self._flushed = port, flushed
        self._run("initdb", "-A", "trust", "-U", "tester", "--no-sync")
        self.url = f"postgresql://tester@127.0.0.1:{self._port}/postgres"

    def _run(self, command: str, *options: str) -> None:
        subprocess.run(
            [command, "-D", str(self._folder / "data"), *options],
            check=True,
            capture_output=True,
            user=self._user,
            cwd=self._folder,
            timeout=60,
        )

    def start(self) -> None:
        options = f"-p {self._port} -k {self._folder} -c listen_addresses=127.0.0.1"
        options += "" if self._flushed else " -c fsync=off"
        deadline_s = time.monotonic() + _START_S
        while True:  # children of a server that was killed hold its memory for a moment longer
            try:
                self._run("pg_ctl", "-w", "-l", str(self._folder / "log"), "-o", options, "start")
                return
            except subprocess.CalledProcessError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.2)

    def stop(self) -> None:
        self._run("pg_ctl", "-w", "-m", "immediate", "stop")

    def kill(self) -> None:
        """SIGKILL of the server; its children notice and leave."""
        pid = int((self._folder / "data" / "postmaster.pid").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._folder)
