"""bench same_run --before SRC: one seeded live run of this version and of an older one, compared.

Two jobs share a rollout node and a train node phase by phase, and publish after every step. Beside
them a client without terms samples: its turns borrow the device of a served model, an engine is
killed under them, and another joins. Tokens, log-probs, losses and the tensors of every version
must be the same to the bit, and each version's records must replay. Without `--before` this version
runs twice.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.fleet import replay_record
from benchmarks.fleet.workload import Answers, datum, generate
from benchmarks.options import BenchOptions
from slackwater.cli.demo import two_nodes
from slackwater.cli.model_export import WeightSource
from slackwater.model.errors import UnavailableError
from slackwater.zoo.tiny import make_model

_JOBS = ("first", "second")
_MODEL = "tiny"
_LIMIT_S = 900.0
_FACTS = ("LendNode", "InstanceLost", "InstanceJoined", "PullVersion", "PermitGiven")


@dataclass(slots=True)
class RunResult:
    """What clients saw, and what the record says happened."""

    session: Answers = field(default_factory=Answers)
    jobs: dict[str, Answers] = field(default_factory=dict)
    versions: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[str, int] = field(default_factory=dict)
    replayed: dict[str, Any] = field(default_factory=dict)


class LiveRun:
    """One service, of this version or of the one in `source`, and its clients."""

    def __init__(self, folder: Path, models: Path, source: Path | None) -> None:
        self._folder = folder
        self._models = models
        # An older version must not find this one's modules.
        paths = {} if source is None else {"PYTHONPATH": str(source)}
        self._environment = os.environ | paths | {"OMP_NUM_THREADS": "1"}
        self._http = httpx.Client(timeout=60.0)
        self.result = RunResult()

    def run(self, steps: int, turns: int, tokens: int) -> RunResult:
        """Both jobs beside the session."""
        with self._service() as (url, key), ThreadPoolExecutor(len(_JOBS) + 1) as pool:
            self._http.base_url, self._http.headers["x-api-key"] = httpx.URL(url), key
            self._until(lambda: self._engine_pids() != [], "an engine")
            session = self.result.session
            disturbed = threading.Event()

            def disturb(done: int) -> None:
                if done >= turns // 4 and not disturbed.is_set():
                    disturbed.set()
                    self._kill_an_engine()

            futures = [pool.submit(self._job, url, key, job, steps) for job in _JOBS]
            futures += [pool.submit(generate, url, key, session, turns, tokens, disturb)]
            for future in futures:
                future.result(_LIMIT_S)
        self._read_records()
        return self.result

    @contextmanager
    def _service(self) -> Iterator[tuple[str, str]]:
        self._folder.mkdir()
        (self._folder / "fleet.toml").write_text(two_nodes())
        command = [sys.executable, "-m", "slackwater", "up", "--port", "0"]
        command += ["--state", str(self._folder / "state"), "--record", str(self._record)]
        command += ["--model", f"{_MODEL}={self._models / 'policy'}"]
        command += ["--serve", f"chat={self._models / 'chat'}", "--lend"]
        command += ["--slo", "ttft=60,tpot=60"]
        command += ["--fleet", str(self._folder / "fleet.toml")]
        command += ["--set", "coschedule.placement=group"]
        log = self._folder / "up.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=self._folder, env=self._environment
            )
        server = self._folder / "state" / "server.json"
        try:
            self._until(lambda: server.is_file() or process.poll() is not None, "the service")
            if process.poll() is not None:
                raise UnavailableError(log.read_text(errors="replace")[-2000:])
            told = json.loads(server.read_text())
            yield told["url"], told["key"]
        finally:
            process.terminate()
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def _record(self) -> Path:
        return self._folder / "record"

    def _until(self, ready: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + _LIMIT_S
        while not ready():
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"waited {_LIMIT_S:.0f} s for {what}")
            time.sleep(0.2)

    # ---- jobs ----
    def _job(self, url: str, key: str, name: str, steps: int) -> None:
        """A job with terms: sample, train and publish, through the public SDK."""
        import tinker

        from slackwater.rl.sdk_client import closing

        profile = {"rollout_s": 1.0, "train_s": 1.0, "sync_s": 0.2}
        terms = {"name": name, "iterations": steps, "slo": 20.0, "profile": profile}
        self._http.post("/slackwater/jobs", json=terms).raise_for_status()
        answers = self.result.jobs[name] = Answers()
        about = {"slackwater_job": name}
        with closing(
            tinker.ServiceClient(base_url=url, api_key=key, user_metadata=about)
        ) as client:
            paths = _steps(client, answers, steps, _JOBS.index(name))
            source, folder = WeightSource(url, key), self._folder / "versions" / name
            for number, path in enumerate(paths):
                out = folder / str(number)
                source.export(path, out, merge=False, base=None, progress=lambda what, share: None)
            self.result.versions[name] = [_digest(folder / str(n)) for n in range(len(paths))]

    # ---- spot events ----
    def _engine_pids(self) -> list[int]:
        pids: dict[str, int] = self._http.get("/slackwater/status").json()["pids"]
        return [pid for name, pid in sorted(pids.items()) if "engine-" in name]

    def _kill_an_engine(self) -> None:
        """And let another join."""
        for pid in self._engine_pids()[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        body = {"count": 1, "model": _MODEL, "kind": "spot", "engine": "embedded"}
        self._http.post("/slackwater/instances", json=body).raise_for_status()

    # ---- records ----
    def _read_records(self) -> None:
        text = "".join(path.read_text() for path in self._folder.glob("record.*.jsonl"))
        self.result.facts = {name: text.count(f'"{name}"') for name in _FACTS}
        config = self._folder / "state" / "config.toml"
        done = subprocess.run(
            [sys.executable, str(replay_record.__file__), str(self._record), str(config)],
            capture_output=True,
            text=True,
            cwd=self._folder,
            env=self._environment,
        )
        said = done.stdout.splitlines()[-1:]
        self.result.replayed = json.loads(said[0]) if said else {"failed": done.stderr[-500:]}


def _steps(client: Any, answers: Answers, steps: int, seed: int) -> list[str]:
    """Policy-gradient steps; the paths of the versions, one before each and one after the last."""
    from tinker import types

    prompts = [[65 + seed, 66, 67 + number, 68] for number in range(3)]
    trainer = client.create_lora_training_client(base_model=_MODEL, rank=4, seed=seed)
    paths = []
    for step in range(steps):
        paths.append(trainer.save_weights_for_sampler(f"step-{step}").result(_LIMIT_S).path)
        sampler = client.create_sampling_client(model_path=paths[-1])
        params = types.SamplingParams(max_tokens=24, temperature=1.0, seed=seed * 1000 + step)
        sampled = [sampler.sample(types.ModelInput.from_ints(p), 4, params) for p in prompts]
        data = []
        for prompt, future in zip(prompts, sampled, strict=True):
            for sequence in future.result(timeout=_LIMIT_S).sequences:
                tokens = list(sequence.tokens)
                answers.samples.append(tokens)
                reward = sum(token < 128 for token in tokens) / len(tokens) - 0.5
                data.append(datum(prompt, tokens, list(sequence.logprobs or ()), reward))
        passed = trainer.forward_backward(data, "importance_sampling")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        answers.losses.append(passed.result(timeout=_LIMIT_S).metrics["loss:sum"])
        stepped.result(timeout=_LIMIT_S)
    return [*paths, trainer.save_weights_for_sampler("last").result(_LIMIT_S).path]


def _digest(version: Path) -> str:
    """Of its tensors, whatever it is called."""
    from safetensors.torch import load_file

    found = hashlib.sha256()
    for file in sorted(version.glob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            found.update(tensor.contiguous().float().numpy().tobytes())
    return found.hexdigest()[:16]


def run(options: BenchOptions) -> dict[str, object]:
    """Both runs, one after the other."""
    steps, turns, tokens = (2, 12, 48) if options.quick else (4, 48, 96)
    source = None if options.before is None else options.before.resolve()
    results = []
    with tempfile.TemporaryDirectory(prefix="slackwater-same-run-") as made:
        models = Path(made) / "models"
        models.mkdir()
        make_model("tiny", models / "policy", options.seed)
        make_model("tiny", models / "chat", options.seed + 1)
        for share, (name, version) in enumerate((("before", source), ("now", None))):
            options.progress(name, share / 2)
            live = LiveRun(Path(made) / name, models, version)
            results.append(live.run(steps, turns, tokens))
    before, now = results
    figures: dict[str, object] = {
        "session_turns": len(now.session.turns),
        "different_session_turns": before.session.different(now.session),
    }
    for job in _JOBS:
        mine, theirs = now.jobs[job], before.jobs[job]
        pairs = zip(before.versions[job], now.versions[job], strict=True)
        figures |= {
            f"{job}.answers": len(mine.samples),
            f"{job}.losses": mine.losses,
            f"{job}.different_answers_and_losses": theirs.different(mine),
            f"{job}.versions": now.versions[job],
            f"{job}.different_versions": sum(one != other for one, other in pairs),
        }
    for name, result in (("before", before), ("now", now)):
        figures |= {f"{name}.happened": result.facts, f"{name}.replayed": result.replayed}
    return figures
