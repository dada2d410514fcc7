"""One RL step through the whole service on one GPU: `python -m benchmarks.service_gpu` prints one
JSON object.

Rollout through the HTTP face and back, forward_backward, optim_step, publish and the first token of
the new version, with the `tinker` SDK as the client; beside each what the part does alone in the
same run. Shapes of Qwen3-1.7B and 8B with random weights, as an adapter of rank 32 and, for 1.7B,
as a whole. Where packages cannot be installed, unpack their wheels and name the folder in
PYTHONPATH. Without a GPU `--small` runs a tiny shape on the CPU, to try the path.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tinker
import torch
from numpy.typing import NDArray

from benchmarks.engine.shapes import SHAPES, product_rate, product_weights
from benchmarks.engine.step_work import SMALL, StepWork, device_name
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net, net_tensors
from slackwater.tensors.checked_file import FOR_TRANSFORMERS, write_tensors

RANK = 32
_READY_S = 240.0
_PART_S = 240.0
_STEPS = 4


def measure(model: Path, config: NetConfig, rank: int, work: StepWork) -> dict[str, float]:
    """All figures of one model and kind of training."""
    kind = ["--rank", str(rank), *(["--small"] if work is SMALL else [])]
    engine, trainer = (_part(name, model, kind) for name in ("engine", "trainer"))
    figures = {
        "engine_alone.tokens_per_s": engine["tokens_per_s"],
        "trainer_alone.rows_per_s": trainer["rows_per_s"],
        "trainer_alone.tflops": trainer["rows_per_s"]
        * (4 if rank else 6)
        * product_weights(config)
        / 1e12,
    }
    with tempfile.TemporaryDirectory() as state, service(model, Path(state), work) as client:
        figures |= through_the_service(client, config, rank, work)
    figures["rollout_over_engine"] = (
        figures["service.tokens_per_s"] / figures["engine_alone.tokens_per_s"]
    )
    figures["pass_over_trainer"] = (
        figures["service.rows_per_s"] / figures["trainer_alone.rows_per_s"]
    )
    return figures


def through_the_service(
    client: tinker.ServiceClient, config: NetConfig, rank: int, work: StepWork
) -> dict[str, float]:
    """Medians of the steps after the first, which compiles and captures."""
    training = client.create_lora_training_client(base_model="policy", rank=rank)
    sampler = training.save_weights_and_get_sampling_client()
    steps: list[dict[str, float]] = []
    for _ in range(_STEPS):
        figures: dict[str, float] = {}
        began_s = time.perf_counter()
        sampled = _rollout(sampler, work, config.vocab_size)
        tokens = sum(len(answer.tokens) for _, answer in sampled)
        figures["service.tokens_per_s"] = tokens / (time.perf_counter() - began_s)
        data = [_datum(prompt, answer) for prompt, answer in sampled[: work.trained * work.samples]]
        began_s = time.perf_counter()
        passed = training.forward_backward(data, "importance_sampling").result()
        figures["service.rows_per_s"] = work.trained_rows / (time.perf_counter() - began_s)
        figures |= _difference(sampled, passed, work)
        began_s = time.perf_counter()
        training.optim_step(tinker.AdamParams(learning_rate=1e-5)).result()
        stepped_s = time.perf_counter()
        sampler = training.save_weights_and_get_sampling_client()
        published_s = time.perf_counter()
        _first_token(sampler, work, config.vocab_size)
        figures["service.optim_step_s"] = stepped_s - began_s
        figures["service.publish_s"] = published_s - stepped_s
        figures["service.step_to_first_token_s"] = time.perf_counter() - stepped_s
        steps.append(figures)
        sys.stderr.write(f"step {len(steps)}: {json.dumps(figures)}\n")
    return {name: float(np.median([step[name] for step in steps[1:]])) for name in steps[0]}


def _difference(
    sampled: list[tuple[list[int], Any]], passed: Any, work: StepWork
) -> dict[str, float]:
    """How far the trainer's log-probs of what was sampled are from the sampler's, of the same
    weights.
    """
    gaps = []
    for (_, answer), output in zip(sampled, passed.loss_fn_outputs, strict=False):
        learner = output["logprobs"].to_numpy()[work.prompt_tokens - 1 :]
        gaps.append(np.abs(learner - np.array(answer.logprobs)))
    every = np.concatenate(gaps)
    return {"logprob_gap_mean": float(every.mean()), "logprob_gap_max": float(every.max())}


@contextmanager
def service(model: Path, state: Path, work: StepWork) -> Iterator[tinker.ServiceClient]:
    """`slackwater up` with one engine and one trainer on the device."""
    command = [sys.executable, "-m", "slackwater", "up", "--state", str(state), "--port", "0"]
    command += ["--model", f"policy={model}", "--device", device_name(), "--threads", "4"]
    command += ["--kv-mb", str(work.kv_mb), "--max-running", str(work.turns)]
    log = state / "bench.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        url, key = _joined(process, state)
        yield tinker.ServiceClient(base_url=url, api_key=key)
    except BaseException:
        for file in (log, *sorted(state.glob("logs/*.log"))):
            sys.stderr.write(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}\n")
        raise
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _joined(process: "subprocess.Popen[bytes]", state: Path) -> tuple[str, str]:
    """Wait until an engine and a trainer are there."""
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s and process.poll() is None:
        time.sleep(0.2)
        file = state / "server.json"
        if not file.is_file():
            continue
        server = json.loads(file.read_text())
        headers = {"x-api-key": server["key"]}
        try:
            answer = httpx.get(f"{server['url']}/slackwater/status", headers=headers, timeout=5)
        except httpx.HTTPError:
            continue
        gauges = answer.json()["gauges"] if answer.status_code == 200 else {}
        if gauges.get("engines") and gauges.get("trainers"):
            return server["url"], server["key"]
    raise RuntimeError(f"the service was not ready after {_READY_S:g} s, or ended")


def _part(name: str, model: Path, options: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.engine.step_work", name, str(model)]
    done = subprocess.run(
        [*command, *options], stdout=subprocess.PIPE, timeout=_PART_S, check=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    sys.stderr.write(f"{name} alone: {found}\n")
    return found


def _rollout(sampler: Any, work: StepWork, vocab_size: int) -> list[tuple[list[int], Any]]:
    """All turns at once; every answer with its prompt, group by group."""
    prompts = work.prompts(vocab_size)
    futures = [
        sampler.sample(
            prompt=tinker.ModelInput.from_ints(prompt),
            num_samples=work.samples,
            sampling_params=tinker.SamplingParams(max_tokens=work.new_tokens, seed=number),
        )
        for number, prompt in enumerate(prompts)
    ]
    return [
        (prompt, answer)
        for prompt, future in zip(prompts, futures, strict=True)
        for answer in future.result().sequences
    ]


def _first_token(sampler: Any, work: StepWork, vocab_size: int) -> None:
    prompt = tinker.ModelInput.from_ints(work.prompts(vocab_size)[0])
    params = tinker.SamplingParams(max_tokens=1)
    sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result()


def _datum(prompt: list[int], answer: Any) -> tinker.Datum:
    """An answer as it was sampled, with an advantage of 1 or -1."""
    whole, unseen = [*prompt, *answer.tokens], len(prompt) - 1
    advantage = 1.0 if answer.tokens[0] % 2 else -1.0
    inputs: dict[str, NDArray[Any]] = {
        "target_tokens": np.array(whole[1:], np.int64),
        "logprobs": np.array([0.0] * unseen + list(answer.logprobs), np.float32),
        "advantages": np.array([0.0] * unseen + [advantage] * len(answer.tokens), np.float32),
    }
    arrays = {name: tinker.TensorData.from_numpy(values) for name, values in inputs.items()}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=arrays)


def _make(model: Path, config: NetConfig) -> None:
    """A model directory with random weights."""
    net = load_net(config, dtype=torch.bfloat16, device=device_name())
    write_tensors(
        model / "model.safetensors", net_tensors(net), {}, FOR_TRANSFORMERS, durable=False
    )
    (model / "config.json").write_text(json.dumps(config.to_hf()))
    del net
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _kinds(shapes: list[str], full: list[str]) -> list[tuple[str, int]]:
    return [(shape, rank) for shape in shapes for rank in (RANK, 0) if rank or shape in full]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["1.7b", "8b"], choices=list(SHAPES))
    parser.add_argument("--full", nargs="*", default=["1.7b"], help="shapes trained whole too")
    parser.add_argument("--small", action="store_true", help="a tiny shape, on any device")
    parser.add_argument("--models", type=Path, default=None, help="folder for the made models")
    options = parser.parse_args()
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    shapes = {"small": NetConfig(max_positions=256)} if options.small else SHAPES
    kinds = _kinds(["small"], ["small"]) if options.small else _kinds(options.shapes, options.full)
    figures: dict[str, float] = {}
    if torch.cuda.is_available():
        figures["product_tflops"] = product_rate() / 1e12
    with tempfile.TemporaryDirectory() as made:
        models = options.models or Path(made)
        for shape, rank in kinds:
            model = models / shape
            if not model.is_dir():
                _make(model, shapes[shape])
            name = f"{shape}.{'lora' if rank else 'full'}"
            work = SMALL if options.small else StepWork()
            found = measure(model, shapes[shape], rank, work)
            figures |= {f"{name}.{key}": value for key, value in found.items()}
            sys.stderr.write(f"{name}: {json.dumps(found)}\n")
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    named = {"name": "service_gpu", "device": device, "figures": figures}
    sys.stdout.write(json.dumps(named) + "\n")


if __name__ == "__main__":
    main()
