"""Part `turns` of `bench plane_kills`: many long turns while the control plane alone is killed.

`regenerated_share`: tokens that engines sampled beyond those of the answers, over those. A killed
engine counts nothing, so `workers_exited` must be 0: engines and trainers that are not the ones
of the beginning. `different`: answers that are not those of the undisturbed beginning.
"""

import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.options import BenchOptions
from harness.killed_service import KilledService
from slackwater.model.errors import UnavailableError

_ANSWER_S = 900.0
_LIMIT_S = 300.0


class LongTurns:
    """Clients that ask for the same long answer again and again, each its own."""

    def __init__(self, service: KilledService, turns: int, tokens: int) -> None:
        import tinker
        from tinker import types

        self._client = tinker.ServiceClient(base_url=service.url, api_key=service.key)
        self._sampler = self._client.create_sampling_client(base_model="tiny")
        self._prompts = [types.ModelInput.from_ints([1 + number, 7]) for number in range(turns)]
        self._params = [
            types.SamplingParams(max_tokens=tokens, temperature=1.0, seed=number)
            for number in range(turns)
        ]
        self.answers: list[list[list[int]]] = [[] for _ in range(turns)]
        self.errors: list[str] = []
        self.enough = threading.Event()

    def ask(self) -> list[threading.Thread]:
        """Begin; each client ends after the answer during which there is enough."""
        threads = [
            threading.Thread(target=self._ask, args=(number,), daemon=True)
            for number in range(len(self.answers))
        ]
        for thread in threads:
            thread.start()
        return threads

    def _ask(self, number: int) -> None:
        try:
            while True:
                asked = self._sampler.sample(self._prompts[number], 1, self._params[number])
                sequence = asked.result(_ANSWER_S).sequences[0]
                self.answers[number].append(list(sequence.tokens))
                if self.enough.is_set():
                    return
        except Exception as error:  # noqa: BLE001  (counted, with its reason)
            self.errors.append(f"{type(error).__name__}: {error}"[:300])


def measure(folder: Path, model: Path, options: BenchOptions) -> dict[str, Any]:
    """20 kills under 128 turns; quick: 4 under 16."""
    turns, tokens, kills = (16, 300, 4) if options.quick else (128, 1000, 20)
    draw = random.Random(f"turns{options.seed}")
    began_s = time.monotonic()
    with KilledService(folder, model, options=("--engines", "2")) as service:
        wait("workers", lambda: len(_workers(service)) == 3)
        calm = LongTurns(service, turns, tokens)
        calm.enough.set()
        join(calm.ask())
        before = _settled_count(service)
        workers = _workers(service)
        rough = LongTurns(service, turns, tokens)
        threads = rough.ask()
        for number in range(kills):
            options.progress(f"turns, kill {number + 1} of {kills}", number / kills)
            time.sleep(draw.uniform(0.0, 3.0))
            service.kill_plane()
            service.start()
            wait("engines", lambda: sampled(service) > 0)
        rough.enough.set()
        join(threads)
        produced = _settled_count(service) - before
        after = _workers(service)
    answered = sum(len(tokens) for answers in rough.answers for tokens in answers)
    expected = [answers[0] if answers else [] for answers in calm.answers]
    pairs = zip(expected, rough.answers, strict=True)
    return {
        "kills": kills,
        "turns": turns,
        "answers": sum(map(len, rough.answers)),
        "tokens": answered,
        "regenerated_share": round((produced - answered) / max(answered, 1), 4),
        "workers_exited": len(set(workers.items()) - set(after.items())),
        "lost": len(calm.errors) + len(rough.errors),
        "lost_what": (calm.errors + rough.errors)[:10],
        "different": sum(answer != first for first, answers in pairs for answer in answers),
        "took_s": round(time.monotonic() - began_s, 1),
        "left": service.left_behind(),
    }


def join(threads: list[threading.Thread]) -> None:
    """Until all have their last answer."""
    deadline_s = time.monotonic() + 2 * _ANSWER_S
    for thread in threads:
        thread.join(max(deadline_s - time.monotonic(), 0.0))
    if any(thread.is_alive() for thread in threads):
        raise UnavailableError(f"answers are missing after {2 * _ANSWER_S:.0f} s")


def wait(what: str, ready: Any) -> None:
    """Until it is so."""
    deadline_s = time.monotonic() + _LIMIT_S
    while not ready():
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"no {what} after {_LIMIT_S:.0f} s")
        time.sleep(0.05)


def sampled(service: KilledService) -> int:
    """Tokens that engines have sampled since they were started, as far as they have told."""
    headers = {"x-api-key": service.key}
    told = httpx.get(f"{service.url}/metrics", headers=headers, timeout=30.0).text
    return sum(int(float(found)) for found in re.findall(r'gauge="produced_tokens".*} (\S+)', told))


def _settled_count(service: KilledService) -> int:
    """Once every engine has told twice that nothing more came."""
    count, since_s = sampled(service), time.monotonic()
    while time.monotonic() - since_s < 3.0:
        time.sleep(0.1)
        if (now := sampled(service)) != count:
            count, since_s = now, time.monotonic()
    return count


def _workers(service: KilledService) -> dict[str, int]:
    pids: dict[str, int] = service.get("/slackwater/status")["pids"]
    return {name: pid for name, pid in pids.items() if name.startswith(("engine", "trainer"))}
