"""A member with an SLO beside neighbours that nobody knows or that declared too little, timed by a
clock outside of the service.

The member's own code asks for permits and sleeps in its phases, so that its work takes as long
whatever else the machine does. The clock knows when the member works, waits and thinks; what the
service says of it is compared with that while it runs.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

SLO = 1.5
_WAIT_S = 240.0
_CLOSE_S = 5.0  # nobody reads how a stranger ended, and the SDK may not end by itself


class JobClient:
    """One job over HTTP."""

    def __init__(self, url: str, key: str, name: str, **terms: Any) -> None:
        self._http = httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=_WAIT_S)
        self.name = name
        answer = self._http.post("/slackwater/jobs", json={"name": name, **terms})
        answer.raise_for_status()
        self.stage = answer.json()["stage"]

    def permit(self, phase: str, iteration: int, over: threading.Event) -> int | None:
        """The permit of a phase; None when it is `over` before."""
        body = {"phase": phase, "iteration": iteration}
        while not over.is_set():
            answer = self._http.post(f"/slackwater/jobs/{self.name}/permits", json=body)
            if answer.status_code == 200:
                return int(answer.json()["permit"])
            assert answer.status_code == 202, answer.text
        return None

    def give_back(self, permit: int, work_s: float) -> None:
        path = f"/slackwater/jobs/{self.name}/permits/{permit}"
        self._http.request("DELETE", path, json={"work_s": work_s}).raise_for_status()

    def row(self) -> dict[str, Any]:
        """What the service says of it."""
        rows = self._http.get("/slackwater/coschedule").json()["jobs"]
        found: dict[str, Any] = next(row for row in rows if row["job"] == f"default/{self.name}")
        return found

    def end(self) -> None:
        self._http.delete(f"/slackwater/jobs/{self.name}")
        self._http.close()


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The slowdown at a moment, and how much of it messages under way can explain."""

    slowdown: float
    unsure: float


class JobClock:
    """Times one job from outside: what it waits for permits is its slowdown, all else it would need
    alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began_s: float | None = None
        self._waited_s = 0.0
        self._asked_s: float | None = None
        self._messages_s = 0.0

    def ask(self) -> None:
        """It asks for a permit."""
        with self._lock:
            self._asked_s = time.monotonic()

    def receive(self) -> None:
        """It has the permit; its SLO counts from the first one."""
        with self._lock:
            now_s = time.monotonic()
            assert self._asked_s is not None
            if self._began_s is None:
                self._began_s = now_s
            else:
                self._waited_s += now_s - self._asked_s
            self._asked_s = None

    def message(self, took_s: float) -> None:
        """A message that waits for nobody took so long there and back."""
        with self._lock:
            self._messages_s += took_s

    def read(self) -> ClockReading | None:
        """So far; None before it began. Each permit is asked for and given back, hence twice the
        time of the messages.
        """
        with self._lock:
            if self._began_s is None:
                return None
            now_s = time.monotonic()
            waits_s = 0.0 if self._asked_s is None else now_s - self._asked_s
            elapsed_s = now_s - self._began_s
            alone_s = max(elapsed_s - self._waited_s - waits_s, 1e-9)
            return ClockReading(elapsed_s / alone_s, 2 * self._messages_s / alone_s)


@dataclass(frozen=True, slots=True)
class PhaseLengths:
    """Of a job that sleeps; `thinks_s` is its own time between training and the next rollout."""

    rollout_s: float
    train_s: float
    thinks_s: float = 0.0


def run_phases(
    client: JobClient,
    lengths: PhaseLengths,
    iterations: int,
    over: threading.Event,
    clock: JobClock | None = None,
) -> None:
    """Make iterations until they are done, or `over`."""
    for iteration in range(iterations):
        for phase, length_s in (("rollout", lengths.rollout_s), ("train", lengths.train_s)):
            if clock is not None:
                clock.ask()
            permit = client.permit(phase, iteration, over)
            if permit is None:
                return
            if clock is not None:
                clock.receive()
            began_s = time.monotonic()
            time.sleep(length_s)
            ended_s = time.monotonic()
            client.give_back(permit, ended_s - began_s)
            if clock is not None:
                clock.message(time.monotonic() - ended_s)
        time.sleep(lengths.thinks_s)


@dataclass(slots=True)
class ClockedRun:
    """The member's slowdown by the clock, and how far the service was from it, as a share."""

    slowdown: float = 0.0
    unsure: float = 0.0
    samples: int = 0
    widest_gap: float = 0.0  # beyond what messages explain
    widest_raw_gap: float = 0.0
    stages: dict[str, str] = field(default_factory=dict)


def watch(member: JobClient, clock: JobClock, done: Callable[[], bool], found: ClockedRun) -> None:
    """Compare the service with the clock until `done`. What the service says is true of a moment
    between two looks at the clock: only what lies outside of both is a gap.
    """
    while not done():
        before, said, after = clock.read(), member.row()["slowdown"], clock.read()
        if before is not None and after is not None and said is not None:
            low, high = sorted((before.slowdown, after.slowdown))
            gap = max(low - said, said - high, 0.0)
            found.samples += 1
            found.widest_raw_gap = max(found.widest_raw_gap, gap / high)
            found.widest_gap = max(found.widest_gap, (gap - after.unsure) / high)
        time.sleep(0.05)


def _supervised(url: str, key: str, job: str, base: str, over: threading.Event) -> None:
    """Trains step after step through the SDK, and never samples."""
    import tinker
    from tinker import types

    from slackwater.rl.sdk_client import closing

    tokens = list(range(3, 67))
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[63]),
            "weights": types.TensorData(data=[1.0] * 63, dtype="float32", shape=[63]),
        },
    )
    sdk = tinker.ServiceClient(base_url=url, api_key=key, user_metadata={"slackwater_job": job})
    with closing(sdk, _CLOSE_S):
        client = sdk.create_lora_training_client(base_model=base, rank=4, seed=1)
        while not over.is_set():
            client.forward_backward([datum] * 8, "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-4)).result(_WAIT_S)


def _sampler(url: str, key: str, job: str, base: str, over: threading.Event) -> None:
    """Samples long answers through the SDK, and never trains."""
    import tinker
    from tinker import types

    from slackwater.rl.sdk_client import closing

    sdk = tinker.ServiceClient(base_url=url, api_key=key, user_metadata={"slackwater_job": job})
    prompt, params = types.ModelInput.from_ints([5, 6, 7]), types.SamplingParams(max_tokens=200)
    with closing(sdk, _CLOSE_S):
        client = sdk.create_sampling_client(base_model=base)
        while not over.is_set():
            client.sample(prompt, 4, params).result(_WAIT_S)


def run_beside_strangers(
    url: str, key: str, base: str, iterations: int, lengths: PhaseLengths
) -> ClockedRun:
    """The member with its SLO beside an unprofiled supervised job, an unprofiled sampler, and a job
    that takes five times what it declared.
    """
    found, over, clock = ClockedRun(), threading.Event(), JobClock()
    declared = {"rollout_s": lengths.rollout_s, "train_s": lengths.train_s}
    member = JobClient(url, key, "member", iterations=iterations, slo=SLO, profile=declared)
    fifth = {name: length_s / 5 for name, length_s in declared.items()}
    jobs = [
        member,
        JobClient(url, key, "supervised", iterations=10_000),
        JobClient(url, key, "sampler", iterations=10_000),
        JobClient(url, key, "liar", iterations=10_000, slo=3.0, profile=fifth),
    ]
    liar = PhaseLengths(lengths.rollout_s, lengths.train_s)
    others = [
        threading.Thread(target=_supervised, args=(url, key, "supervised", base, over)),
        threading.Thread(target=_sampler, args=(url, key, "sampler", base, over)),
        threading.Thread(target=run_phases, args=(jobs[3], liar, 10_000, over)),
    ]
    worker = threading.Thread(target=run_phases, args=(member, lengths, iterations, over, clock))
    try:
        for thread in (*others, worker):
            thread.start()
        watch(member, clock, lambda: not worker.is_alive(), found)
        last = clock.read()
        assert last is not None
        found.slowdown, found.unsure = last.slowdown, last.unsure
        found.stages = {job.name: str(job.row()["stage"]) for job in jobs}
    finally:
        over.set()
        for thread in (others[2], worker):
            thread.join(_WAIT_S)
        for job in jobs:
            job.end()
        for thread in others[:2]:
            thread.join(_WAIT_S)
    return found
