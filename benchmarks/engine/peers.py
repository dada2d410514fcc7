"""Other engines on the same requests: transformers' continuous batching, and a vLLM server."""

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from slackwater.model.errors import UnavailableError

Prompt = tuple[int, ...]
VLLM_START_S = 300.0


@dataclass(frozen=True, slots=True)
class Spent:
    """What some requests took: by the clock, and in CPU time of all processes of that engine."""

    wall_s: float
    cpu_s: float


class Stopwatch:
    """Started when made; `process` and all its descendants are counted, by default this one
    alone.
    """

    def __init__(self, process: psutil.Process | None = None) -> None:
        self._process = process
        self._wall_s, self._cpu_s = time.perf_counter(), self._cpu()

    def spent(self) -> Spent:
        return Spent(time.perf_counter() - self._wall_s, self._cpu() - self._cpu_s)

    def _cpu(self) -> float:
        if self._process is None:
            return time.process_time()
        total = 0.0
        for one in (self._process, *self._process.children(recursive=True)):
            times = one.cpu_times()
            total += times.user + times.system
        return total


class TransformersBatching:
    """`generate_batch` on the CPU, its cache bounded: by default it takes most of the memory."""

    def __init__(self, directory: Path) -> None:
        import transformers

        library: Any = transformers
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
        self._library = library
        self._model = library.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    def seconds(self, prompts: Sequence[Prompt], output: int) -> Spent:
        """What `output` tokens for every prompt take."""
        sampling = self._library.GenerationConfig(
            max_new_tokens=output, do_sample=True, eos_token_id=-1, pad_token_id=0
        )
        bounds = self._library.ContinuousBatchingConfig(
            block_size=32, num_blocks=512, max_batch_tokens=1024
        )
        watch = Stopwatch()
        with torch.inference_mode():
            answers = self._model.generate_batch(
                inputs=[list(prompt) for prompt in prompts],
                generation_config=sampling,
                continuous_batching_config=bounds,
                progress_bar=False,
                warmup=False,
            )
        spent = watch.spent()
        made = sum(len(answer.generated_tokens) for answer in answers.values())
        if made != len(prompts) * output:
            raise UnavailableError(f"transformers made {made} tokens, not {len(prompts) * output}")
        return spent


class VllmServer:
    """A running `vllm serve` on one core."""

    def __init__(self, port: int, model: str, pid: int) -> None:
        self._port, self._model = port, model
        self._process = psutil.Process(pid)

    def seconds(self, prompts: Sequence[Prompt], output: int) -> Spent:
        """What `output` tokens for every prompt take, all asked at once."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            watch = Stopwatch(self._process)
            made = list(threads.map(lambda prompt: self._complete(prompt, output), prompts))
            spent = watch.spent()
        if made != [output] * len(prompts):
            raise UnavailableError(f"vLLM made {made} tokens, not {output} each")
        return spent

    def _complete(self, prompt: Prompt, output: int) -> int:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": output,
            "ignore_eos": True,
            "temperature": 1.0,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return int(answer["usage"]["completion_tokens"])

    def healthy(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


@contextmanager
def vllm_server(venv: Path, directory: Path, log: Path) -> Iterator[VllmServer]:
    """Start `vllm serve` from its own environment; stop it, and all it started, at the end."""
    port = _free_port()
    command = [str(venv / "bin" / "vllm"), "serve", str(directory), "--dtype", "float32"]
    command += ["--max-model-len", "1024", "--enforce-eager", "--host", "127.0.0.1"]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env=os.environ | settings,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            server = VllmServer(port, str(directory), process.pid)
            deadline = time.monotonic() + VLLM_START_S
            while not server.healthy():
                if process.poll() is not None or time.monotonic() > deadline:
                    tail = log.read_text(errors="replace").strip().splitlines()[-1:]
                    raise UnavailableError(f"vllm serve did not come up: {' '.join(tail)}")
                time.sleep(0.5)
            yield server
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            continue
        break
    process.wait()


def _free_port() -> int:
    """Below 32768: a loopback port above can connect to itself."""
    for port in range(21000, 32768, 7):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise UnavailableError("no free port between 21000 and 32768")
