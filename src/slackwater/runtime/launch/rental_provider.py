"""Providers that rent nodes by a command: `sbatch`, a cloud's command line, a script."""

import asyncio
import contextlib
import math
import os
import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.ids import NodeId

_ANSWERS_WITHIN_S = 120.0
_FIELDS = {"rent": {"node", "token_file"}, "release": {"node", "id"}}


@dataclass(frozen=True, slots=True)
class RentalProvider:
    """Rents up to `nodes` nodes for a pool, whose `price_per_h` they cost.

    `rent` starts a machine that runs `slackwater agent --join-file {token_file}` and prints the
    machine's id in its last line; `release` ends the machine `{id}`, also one that is gone.
    `budget` is the most that all of them may cost in all, in the price's currency. After `idle_s`
    without a job that can use them they are released.
    """

    pool: str
    rent: str
    release: str
    budget: float
    nodes: int = 1
    idle_s: float = 600.0

    def __post_init__(self) -> None:
        for field in ("rent", "release"):
            self._check_command(field, getattr(self, field))
        if self.nodes < 1:
            raise self._wrong("nodes", self.nodes, "must be at least 1")
        for field in ("budget", "idle_s"):
            if not 0 < getattr(self, field) < math.inf:
                raise self._wrong(field, getattr(self, field), "must be above 0")

    def _check_command(self, field: str, command: str) -> None:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise self._wrong(field, command, f"is not a command: {error}") from None
        if not words:
            raise self._wrong(field, command, "must be a command")
        if unknown := set(re.findall(r"\{(\w*)\}", command)) - _FIELDS[field]:
            known = " and ".join(f"{{{name}}}" for name in sorted(_FIELDS[field]))
            raise self._wrong(field, f"{{{min(unknown)}}}", f"is unknown; there are {known}")

    def _wrong(self, field: str, value: object, fix: str) -> ConfigError:
        return ConfigError.of(f"providers: {self.pool}: {field}", value, fix)

    @property
    def node_names(self) -> tuple[NodeId, ...]:
        """The names under which its nodes join."""
        return tuple(NodeId(f"{self.pool}-rented-{number}") for number in range(self.nodes))

    async def rent_node(self, node: NodeId, token_file: Path) -> str:
        """Start a machine; returns its id."""
        output = await _run(self.rent, node=str(node), token_file=str(token_file))
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        if not lines or len(lines[-1]) > 200:
            raise UnavailableError(f"providers: {self.pool}: rent printed no id")
        return lines[-1]

    async def release_node(self, node: NodeId, machine: str) -> None:
        await _run(self.release, node=str(node), id=machine)


async def _run(command: str, **values: str) -> str:
    """The output of a command; a value put into one of its words cannot become several."""
    words = shlex.split(command)
    for name, value in values.items():
        words = [word.replace(f"{{{name}}}", value) for word in words]
    # Files, not pipes: a machine that the command leaves behind would hold a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except OSError as error:
            raise UnavailableError(f"{words[0]}: {error.strerror}") from None
        try:
            async with asyncio.timeout(_ANSWERS_WITHIN_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise UnavailableError(f"{words[0]} did not end in {_ANSWERS_WITHIN_S:g} s") from None
        if process.returncode:
            lines = _text(err).splitlines()
            why = lines[-1] if lines else f"status {process.returncode}"
            raise UnavailableError(f"{words[0]}: {why[:300]}")
        return _text(out)


def _text(file: IO[bytes]) -> str:
    """The end of what a command wrote."""
    file.seek(max(file.seek(0, os.SEEK_END) - 65536, 0))
    return file.read().decode(errors="replace").strip()
