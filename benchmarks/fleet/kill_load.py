"""One tenant's work for `bench plane_kills`: train, sample, save, load and export, the same to the
bit every time it is done undisturbed.
"""

import hashlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from slackwater.cli.model_export import WeightSource
from slackwater.model.errors import UnavailableError

_ANSWER_S = 600.0
_PROMPTS = (b"one plus two is", b"the sea is")


@dataclass(slots=True)
class Seen:
    """What the service acknowledged to one tenant, in order, and the paths that it said were saved;
    `error` if the work broke.
    """

    results: list[tuple[str, Any]] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    error: str = ""


def work(
    url: str, key: str, seed: int, rounds: int, acknowledged: Callable[[str, Any], None]
) -> list[str]:
    """All rounds; `acknowledged` hears each result. The paths that were saved."""
    import tinker

    from slackwater.rl.sdk_client import closing

    saved: list[str] = []
    with closing(tinker.ServiceClient(base_url=url, api_key=key)) as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=seed)
        for number in range(rounds):
            _train(trainer, seed * 1000 + number, acknowledged)
            state = trainer.save_state(f"state-{number}").result(_ANSWER_S).path
            sampler = trainer.save_weights_for_sampler(f"sampler-{number}").result(_ANSWER_S).path
            saved += [state, sampler]
            acknowledged("save", number)
            trainer = client.create_training_client_from_state_with_optimizer(state)
            acknowledged("load", number)
            acknowledged("export", _exported(url, key, sampler))
    return saved


def _train(trainer: Any, seed: int, acknowledged: Callable[[str, Any], None]) -> None:
    from tinker import types

    sampler = trainer.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=16, temperature=1.0, seed=seed)
    asked = [
        (prompt, sampler.sample(types.ModelInput.from_ints(list(prompt)), 2, params))
        for prompt in _PROMPTS
    ]
    data = []
    for prompt, future in asked:
        for sequence in future.result(_ANSWER_S).sequences:
            tokens, logprobs = list(sequence.tokens), list(sequence.logprobs or ())
            acknowledged("sample", (tokens, logprobs))
            data.append(_datum([*prompt, *tokens]))
    passed = trainer.forward_backward(data, "cross_entropy")
    stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
    acknowledged("train", passed.result(_ANSWER_S).metrics["loss:sum"])
    stepped.result(_ANSWER_S)


def _datum(tokens: list[int]) -> Any:
    from tinker import types

    shape = [len(tokens) - 1]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=shape),
            "weights": types.TensorData(data=[1.0] * shape[0], dtype="float32", shape=shape),
        },
    )


def _exported(url: str, key: str, path: str) -> str:
    """The digest of an exported sampler's files. A download that broke is begun again, as a person
    would.
    """
    deadline_s = time.monotonic() + _ANSWER_S
    while True:
        with tempfile.TemporaryDirectory(prefix="slackwater-export-") as folder:
            out = Path(folder) / "out"
            try:
                source = WeightSource(url, key)
                source.export(path, out, merge=False, base=None, progress=lambda what, share: None)
            except (httpx.HTTPError, UnavailableError, OSError):
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.5)
                continue
            digest = hashlib.sha256()
            for file in sorted(out.iterdir()):
                if file.suffix == ".safetensors":
                    digest.update(file.name.encode() + file.read_bytes())
            return digest.hexdigest()


def missing(url: str, key: str, saved: list[str]) -> list[str]:
    """Saved paths that can no longer be opened: a state that cannot be trained on, a sampler that
    cannot be exported.
    """
    import tinker

    from slackwater.rl.sdk_client import closing

    gone = []
    with closing(tinker.ServiceClient(base_url=url, api_key=key)) as client:
        for path in saved:
            try:
                if "/sampler_weights/" in path:
                    _exported(url, key, path)
                else:
                    client.create_training_client_from_state(path)
            except Exception as error:  # noqa: BLE001  (whatever the reason, it is gone)
                gone.append(f"{path}: {error}"[:300])
    return gone
