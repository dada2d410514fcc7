"""A small training run with any `tinker`: `python sdk_probe.py URL KEY` prints a line a call.

A script of its own, not a module of this package: it runs beside SDKs from 0.6.0 on, which have
neither the same methods nor the same types, and must import nothing else of the project.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import tinker
from tinker import types

LIMIT_S = 60
TOKENS = list(range(10, 20))
PROMPT = types.ModelInput.from_ints(tokens=TOKENS[:3])
PARAMS = types.SamplingParams(max_tokens=4, temperature=1.0)


class Probe:
    """Calls one after the other; what an earlier one gave is what later ones need."""

    def __init__(self, url: str, key: str) -> None:
        self.service: Any = tinker.ServiceClient(base_url=url, api_key=key)
        self.training: Any = None
        self.failed = 0

    def call(self, name: str, what: Callable[[], object]) -> object:
        """Do it within a limit, and say on one line what came of it."""
        began_s = time.monotonic()
        signal.alarm(LIMIT_S)
        try:
            found = what()
        except Exception as error:  # noqa: BLE001 - whatever the SDK raises is the finding
            self.failed += 1
            print(json.dumps({"call": name, "error": f"{type(error).__name__}: {error}"[:300]}))
            return None
        finally:
            signal.alarm(0)
        print(json.dumps({"call": name, "seconds": round(time.monotonic() - began_s, 2)}))
        return found

    def run(self) -> None:
        self.call("get_server_capabilities", self.service.get_server_capabilities)
        self.training = self.service.create_lora_training_client(base_model="tiny", rank=4)
        for loss, inputs in _INPUTS.items():
            self.call(f"forward_backward {loss}", partial(self._backward, inputs, loss))
            self.call("optim_step", self._step)
        self.call("forward", self._forward)
        self.call("forward_backward_custom", self._custom)
        state = self.call("save_state", lambda: self.training.save_state("a").result().path)
        self.call("load_state", lambda: self.training.load_state(state).result())
        saved = self.call("save_weights_for_sampler", self._save)
        sampler: Any = self.service.create_sampling_client(model_path=saved)
        self.call("sample", lambda: _sample(sampler))
        self.call("compute_logprobs", lambda: sampler.compute_logprobs(PROMPT).result())
        newest: Any = self.training.save_weights_and_get_sampling_client("c")
        self.call("sample of the newest", lambda: _sample(newest))
        self.call("from_state", lambda: self.service.create_training_client_from_state(state))
        rest = self.service.create_rest_client()
        self.call("list_training_runs", lambda: rest.list_training_runs().result())
        if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
            archive = rest.get_checkpoint_archive_url_from_tinker_path
            self.call("get_checkpoint_archive_url", lambda: archive(saved).result())

    def _backward(self, inputs: dict[str, list[float]], loss: str) -> None:
        found = self.training.forward_backward([_datum(inputs)], loss).result()
        assert len(found.loss_fn_outputs[0]["logprobs"].data) == len(TOKENS)
        assert "loss:sum" in found.metrics

    def _step(self) -> None:
        self.training.optim_step(types.AdamParams(learning_rate=1e-3)).result()

    def _forward(self) -> None:
        data = [_datum(_INPUTS["cross_entropy"])]
        assert self.training.forward(data, "cross_entropy").result().loss_fn_outputs

    def _custom(self) -> None:
        def loss(data: Any, logprobs: Any) -> Any:
            return -sum(each.sum() for each in logprobs), {}

        data = [_datum(_INPUTS["cross_entropy"])]
        self.training.forward_backward_custom(data, loss).result()

    def _save(self) -> object:
        return self.training.save_weights_for_sampler("b").result().path


_INPUTS: dict[str, dict[str, list[float]]] = {
    "cross_entropy": {"weights": [1.0] * len(TOKENS)},
    "importance_sampling": {"logprobs": [-1.0] * len(TOKENS), "advantages": [1.0] * len(TOKENS)},
}


def _datum(inputs: dict[str, list[float]]) -> types.Datum:
    targets: Any = [token + 1 for token in TOKENS]
    given: Any = {"target_tokens": targets, **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens=TOKENS), loss_fn_inputs=given)


def _sample(sampler: Any) -> None:
    drawn = sampler.sample(prompt=PROMPT, num_samples=2, sampling_params=PARAMS).result()
    assert [len(one.tokens) == len(one.logprobs) for one in drawn.sequences] == [True, True]


def _too_late(number: int, frame: object) -> None:
    raise TimeoutError(f"no answer within {LIMIT_S} s")


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, _too_late)
    probe = Probe(*sys.argv[1:3])
    probe.run()
    sys.stdout.flush()
    os._exit(int(probe.failed > 0))  # old SDKs leave threads that never end
