"""The soak's clients: each repeats one kind of work through the public APIs until it is told to
stop.
"""

import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

_ANSWER_S = 300.0
_PAUSE_S = 1.0  # after a request that failed
_STEPS_OF_A_MODEL = 12
# A client does the next one so long after the last: what a service remembers follows its load, so
# the load must not follow what else the machine does.
_EVERY_S = {"train": 8.0, "save": 0.0, "stream": 1.6, "action": 1.6}
_PROMPTS = (b"one plus two is", b"three plus four is", b"the sea is")
Client = Callable[["Soak", random.Random], None]


@dataclass(slots=True)
class Soak:
    """What the clients share: where the service is, what they did, and when they stop."""

    url: str
    key: str
    stopping: threading.Event = field(default_factory=threading.Event)
    done: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    last_error: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _client: threading.local = field(default_factory=threading.local)

    def count(self, what: str) -> None:
        """The calling client has done one more; it waits until its next one is due."""
        with self._lock:
            self.done[what] += 1
        now_s = time.monotonic()
        due_s = max(getattr(self._client, "due_s", now_s) + _EVERY_S[what], now_s)
        self._client.due_s = due_s
        self.stopping.wait(due_s - now_s)

    def fail(self, what: str, error: Exception) -> None:
        with self._lock:
            self.failed[what] += 1
            self.last_error = f"{what}: {type(error).__name__}: {error}"[:500]

    def http(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=_ANSWER_S)


def train_and_sample(soak: Soak, rng: random.Random) -> None:
    """A model of its own for some steps of sampling and training; then another, as runs come and
    go.
    """
    import tinker

    from slackwater.rl.sdk_client import closing

    with closing(tinker.ServiceClient(base_url=soak.url, api_key=soak.key)) as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=rng.choice((2, 4, 8)))
        for step in range(_STEPS_OF_A_MODEL):
            if soak.stopping.is_set():
                return
            _train_step(trainer, rng)
            soak.count("train")
            if step == _STEPS_OF_A_MODEL // 2:
                saved = trainer.save_state(f"half-{rng.randrange(1 << 30)}").result(_ANSWER_S)
                trainer.load_state(saved.path).result(_ANSWER_S)
                soak.count("save")


def _train_step(trainer: Any, rng: random.Random) -> None:
    from tinker import types

    sampler = trainer.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=rng.randint(4, 48), temperature=1.0)
    asked = [
        (prompt, sampler.sample(types.ModelInput.from_ints(list(prompt)), 2, params))
        for prompt in _PROMPTS
    ]
    data = [
        _datum(list(prompt) + list(sequence.tokens))
        for prompt, future in asked
        for sequence in future.result(timeout=_ANSWER_S).sequences
    ]
    passed = trainer.forward_backward(data, "cross_entropy")
    stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-3))
    passed.result(timeout=_ANSWER_S)
    stepped.result(timeout=_ANSWER_S)


def _datum(tokens: list[int]) -> Any:
    from tinker import types

    shape = [len(tokens) - 1]
    weights = types.TensorData(data=[1.0] * shape[0], dtype="float32", shape=shape)
    targets = types.TensorData(data=tokens[1:], dtype="int64", shape=shape)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )


def stream(soak: Soak, rng: random.Random) -> None:
    """Completions as event streams, of all lengths; now and then the client leaves in the
    middle.
    """
    with soak.http() as client:
        while not soak.stopping.is_set():
            words = " ".join(rng.choice(("tide", "ebb", "flow", "moon")) for _ in range(99))
            body = {
                "model": "tiny",
                "prompt": words[: rng.randint(1, 400)],
                "max_tokens": rng.randint(1, 120),
                "stream": True,
                "ignore_eos": True,
            }
            leaves_after = rng.choice((3, None, None, None))
            with client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                for _ in itertools.islice(answer.iter_lines(), leaves_after):
                    pass
            soak.count("stream")


def act(soak: Soak, rng: random.Random) -> None:
    """Actions in environments that are opened and closed, and actions of their own."""
    with soak.http() as client:
        while not soak.stopping.is_set():
            with _environment(client) as environment:
                for _ in range(rng.randint(1, 6)):
                    kib = rng.choice((1, 16, 256))
                    body = {
                        "command": ["sh", "-c", f"head -c {kib}K /dev/zero | tr '\\0' x"],
                        "environment": environment if rng.random() < 0.7 else None,
                        "wait_s": 30,
                    }
                    client.post("/slackwater/actions", json=body).raise_for_status()
                    soak.count("action")


@contextlib.contextmanager
def _environment(client: httpx.Client) -> Iterator[str]:
    answer = client.post("/slackwater/environments", json={"wait_s": 30}).raise_for_status()
    name = answer.json()["environment"]
    try:
        yield name
    finally:
        client.delete(f"/slackwater/environments/{name}").raise_for_status()


KINDS: tuple[Client, ...] = (train_and_sample, stream, stream, act)


class SoakClients:
    """So many threads, of all kinds, each with a random stream of its own; they work while in the
    context.
    """

    def __init__(self, soak: Soak, count: int, seed: int) -> None:
        self._soak = soak
        self._threads = [
            threading.Thread(
                target=self._repeat,
                args=(KINDS[number % len(KINDS)], random.Random(seed * 1000 + number)),
                name=f"soak-{number}",
                daemon=True,
            )
            for number in range(count)
        ]

    def __enter__(self) -> "SoakClients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._soak.stopping.set()
        deadline_s = time.monotonic() + _ANSWER_S
        for thread in self._threads:
            thread.join(max(deadline_s - time.monotonic(), 0.0))

    def unfinished(self) -> int:
        """Clients whose last request was never answered."""
        return sum(thread.is_alive() for thread in self._threads)

    def _repeat(self, kind: Client, rng: random.Random) -> None:
        while not self._soak.stopping.is_set():
            try:
                kind(self._soak, rng)
            except Exception as error:  # noqa: BLE001  (a soak goes on, and says how often)
                self._soak.fail(kind.__name__, error)
                self._soak.stopping.wait(_PAUSE_S)
