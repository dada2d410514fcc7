"""bench plane_kills: two tenants train, sample, save, load and export while the control plane is
killed again and again.

SIGKILL of the control plane at random points of the work, 20 times, each time started again at
once; with PostgreSQL every second time the database is killed too. The same work runs undisturbed
first, on a service of its own. Parts: `sqlite`, `postgres`; `turns` (`turn_kills.py`): many long
turns.

`<part>_lost`: what the service had acknowledged and lost: saved states and samplers that cannot be
opened afterwards, and work that ended in an error. `<part>_different`: results (samples with their
log-probs, losses, exported weights) that differ from the undisturbed run's. Both must be 0; `lost`
and `different` are the sums. `<part>_broke`: why a part could not be measured. `<part>_left`:
processes, ports and files that a stopped service left.
"""

import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.fleet import turn_kills
from benchmarks.fleet.kill_load import Seen, missing, work
from benchmarks.options import BenchOptions
from harness.killed_service import KilledService
from harness.ports import free_port
from harness.postgres_cluster import PostgresCluster, can_run_postgres
from slackwater.model.errors import SlackwaterError, UnavailableError
from slackwater.zoo.tiny import make_model

PARTS = ("sqlite", "postgres", "turns")
_TENANTS = ("tide", "ebb")
_LIMIT_S = 3600.0
_RESULTS_A_ROUND = 8  # four samples, a loss, a save, a load, an export


@dataclass(slots=True)
class TwoTenants:
    """The work of both, each in a thread of its own."""

    service: KilledService
    rounds: int
    seen: dict[str, Seen] = field(default_factory=lambda: {name: Seen() for name in _TENANTS})
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for seed, tenant in enumerate(_TENANTS, start=1):
            thread = threading.Thread(target=self._work, args=(tenant, seed), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self, tenant: str, seed: int) -> None:
        seen, key = self.seen[tenant], self.service.key_of(tenant)
        heard = partial(_note, seen)
        try:
            seen.saved = work(self.service.url, key, seed, self.rounds, heard)
        except Exception as error:  # noqa: BLE001  (counted as lost, with its reason)
            seen.error = f"{tenant}: {type(error).__name__}: {error}"[:500]

    @property
    def done(self) -> int:
        return sum(len(seen.results) for seen in self.seen.values())

    @property
    def over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self, results: int) -> None:
        """Until so many results came, or all work is over."""
        deadline_s = time.monotonic() + _LIMIT_S
        while self.done < results and not self.over:
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"{self.done} of {results} results after {_LIMIT_S:.0f} s")
            time.sleep(0.05)


def _note(seen: Seen, what: str, value: Any) -> None:
    seen.results.append((what, value))


def run(options: BenchOptions) -> dict[str, Any]:
    """Both parts; PostgreSQL where it is installed."""
    figures: dict[str, Any] = {"lost": 0, "different": 0}
    parts = [part for part in PARTS if options.wants(part)]
    if not can_run_postgres() and "postgres" in parts:
        parts.remove("postgres")
        figures["postgres_skipped"] = "PostgreSQL is not installed"
    with tempfile.TemporaryDirectory(prefix="slackwater-plane-kills-") as made:
        make_model("tiny", Path(made) / "model", options.seed)
        for place, part in enumerate(parts):
            try:
                if part == "turns":
                    found = turn_kills.measure(Path(made) / part, Path(made) / "model", options)
                else:
                    done, share = place / len(parts), 1 / len(parts)
                    found = _part(part, Path(made), options, done, share)
            except (SlackwaterError, OSError, subprocess.SubprocessError) as error:
                figures[f"{part}_broke"] = f"{type(error).__name__}: {error}"[:1000]
                continue  # what the other part showed is printed
            figures |= {f"{part}_{name}": value for name, value in found.items()}
            figures["lost"] += found["lost"]
            figures["different"] += found["different"]
            if part == "turns":
                figures |= {name: found[name] for name in ("regenerated_share", "workers_exited")}
    return figures


def _part(
    part: str, folder: Path, options: BenchOptions, done: float, share: float
) -> dict[str, Any]:
    kills = 5 if options.quick else 20
    rounds = 3 if options.quick else 8
    options.progress(f"{part}, undisturbed", done)
    with _service(part, folder / f"{part}-calm", folder / "model") as (service, _):
        calm = TwoTenants(service, rounds)
        calm.start()
        calm.wait(2 * rounds * _RESULTS_A_ROUND + 1)
    began_s = time.monotonic()
    with _service(part, folder / f"{part}-killed", folder / "model") as (service, database):
        rough = TwoTenants(service, rounds)
        rough.start()
        draw = random.Random(f"{part}{options.seed}")
        total = max(calm.done, 1)
        moments = sorted(draw.uniform(0.02, 0.95) for _ in range(kills))
        databases = 0
        for number, moment in enumerate(moments):
            rough.wait(int(moment * total))
            options.progress(f"{part}, kill {number + 1} of {kills}", done + share * moment)
            time.sleep(draw.uniform(0.0, 0.5))  # anywhere within a request
            databases += _kill(service, database if number % 2 else None)
        rough.wait(2 * rounds * _RESULTS_A_ROUND + 1)
        gone = [
            lost
            for tenant, seen in rough.seen.items()
            for lost in missing(service.url, service.key_of(tenant), seen.saved)
        ]
    errors = [seen.error for seen in (*calm.seen.values(), *rough.seen.values()) if seen.error]
    return {
        "kills": kills,
        "database_kills": databases,
        "results": rough.done,
        "lost": len(gone) + len(errors),
        "lost_what": gone + errors,
        "different": sum(_different(calm.seen[name], rough.seen[name]) for name in _TENANTS),
        "took_s": round(time.monotonic() - began_s, 1),
        "left": service.left_behind(),
    }


def _different(calm: Seen, rough: Seen) -> int:
    longer = abs(len(calm.results) - len(rough.results))
    pairs = zip(calm.results, rough.results, strict=False)
    return longer + sum(one != other for one, other in pairs)


def _kill(service: KilledService, database: PostgresCluster | None) -> int:
    """The control plane, and the database with it if there is one; how many databases."""
    if database is None:
        service.kill("plane", "")
        return 0
    database.kill()
    service.kill_plane()
    database.start()
    service.start()
    return 1


@contextmanager
def _service(
    part: str, folder: Path, model: Path
) -> Iterator[tuple[KilledService, PostgresCluster | None]]:
    options = [word for tenant in _TENANTS for word in ("--tenant", tenant)]
    database = PostgresCluster(free_port(), flushed=True) if part == "postgres" else None
    try:
        if database is not None:
            database.start()
            options += ["--database", database.url]
        with KilledService(folder, model, options=options) as service:
            yield service, database
    finally:
        if database is not None:
            database.remove()
