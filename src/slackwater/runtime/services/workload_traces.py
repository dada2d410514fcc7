"""Traces for `slackwater plan`: served requests and spot engines, one file a day for a week."""

import asyncio
import logging
import re
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

TraceKind = Literal["served", "spot"]

COLUMNS: dict[TraceKind, str] = {
    "served": "t_s,prompt_tokens,output_tokens",
    "spot": "t_s,event,instance_id",
}
_ROW: dict[TraceKind, re.Pattern[str]] = {
    "served": re.compile(r"\d+\.\d{3},\d+,\d+\n"),
    "spot": re.compile(r"\d+\.\d{3},(add|remove),[^,\n]+\n"),
}
_KEPT_S = 7 * 86_400.0
_MAX_DAY_BYTES = 64 << 20  # more of one day is left out


class WorkloadTraces:
    """Keeps rows in memory until `save` is called."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._noted: dict[TraceKind, list[str]] = {"served": [], "spot": []}
        self._spot: set[str] = set()

    def record_served(self, took_s: float, prompt_tokens: int, output_tokens: int) -> None:
        at_s = time.time() - took_s
        self._noted["served"].append(f"{at_s:.3f},{prompt_tokens},{output_tokens}\n")

    def record_spot(self, present: Iterable[str]) -> None:
        """Record which spot engines joined and left since the last call."""
        now, at_s = set(present), time.time()
        for event, names in (("add", now - self._spot), ("remove", self._spot - now)):
            self._noted["spot"] += [f"{at_s:.3f},{event},{name}\n" for name in sorted(names)]
        self._spot = now

    async def save(self) -> None:
        """Append the rows to the day's files, and remove files older than a week."""
        noted, self._noted = self._noted, {"served": [], "spot": []}
        try:
            await asyncio.to_thread(self._append, noted)
        except OSError as error:
            logger.warning("traces for the planner are not kept folder=%s: %s", self._folder, error)

    def _append(self, noted: dict[TraceKind, list[str]]) -> None:
        for kind, rows in noted.items():
            if not rows:
                continue
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"{kind}-{datetime.now(UTC):%Y-%m-%d}.csv"
            if not path.exists() or path.stat().st_size < _MAX_DAY_BYTES:
                with path.open("a", encoding="ascii") as file:
                    file.writelines(rows)
        oldest_s = time.time() - _KEPT_S
        for path in self._folder.glob("*.csv"):
            if path.stat().st_mtime < oldest_s:
                path.unlink(missing_ok=True)

    def trace(self, kind: TraceKind) -> Iterator[bytes]:
        """A CSV with a header; its times are seconds since the first row's."""
        yield f"{COLUMNS[kind]}\n".encode()
        first_s: float | None = None
        for row in self._rows(kind):
            at, _, rest = row.partition(",")
            if _ROW[kind].fullmatch(row) is None:
                continue  # half a row, from when the disk was full or the service was killed
            at_s = float(at)
            first_s = at_s if first_s is None else first_s
            yield f"{max(at_s - first_s, 0.0):.3f},{rest}".encode()

    def _rows(self, kind: TraceKind) -> Iterator[str]:
        for path in sorted(self._folder.glob(f"{kind}-*.csv")):
            with path.open(encoding="ascii", errors="replace") as file:
                yield from file
        yield from self._noted[kind]
