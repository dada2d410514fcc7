"""One GRPO job as a process of its own, through the public SDK; writes down what it sampled, its
losses and when each step ended.

    python -m benchmarks.coscheduling.grpo_driver URL JOB FILE SEED STEPS GROUPS GROUP_SIZE TOKENS

The key is in `SLACKWATER_KEY`. The client knows nothing of phases or permits: it names its job, and
that is all. A random model is rewarded for answers in plain letters, so that every group teaches
something and answers keep their length.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_RANK = 8
_LEARNING_RATE = 1e-3
_TIMEOUT_S = 600.0
_PROMPT_TOKENS = 16


def main(url: str, job: str, file: Path, numbers: Sequence[int]) -> None:
    """Run the job to its end."""
    import tinker

    from slackwater.rl.sdk_client import closing

    seed, steps, groups, size, tokens = numbers
    draw = np.random.default_rng(seed)
    prompts = draw.integers(32, 127, (groups, _PROMPT_TOKENS)).tolist()
    result: dict[str, Any] = {"began_s": time.time(), "ended_s": [], "losses": [], "tokens": []}
    client = tinker.ServiceClient(
        base_url=url,
        api_key=os.environ["SLACKWATER_KEY"],
        user_metadata={"slackwater_job": job},
    )
    with closing(client) as service:
        training = service.create_lora_training_client(base_model="job", rank=_RANK, seed=seed)
        for step in range(steps):
            sampler = training.save_weights_and_get_sampling_client()
            params = tinker.SamplingParams(max_tokens=tokens, seed=seed * 1000 + step)
            futures = [
                sampler.sample(tinker.ModelInput.from_ints(prompt), size, params)
                for prompt in prompts
            ]
            data = []
            for prompt, future in zip(prompts, futures, strict=True):
                sampled = future.result(timeout=_TIMEOUT_S).sequences
                result["tokens"].append([list(one.tokens) for one in sampled])
                data += _group(prompt, sampled)
            passed = training.forward_backward(data, "importance_sampling")
            stepped = training.optim_step(tinker.AdamParams(learning_rate=_LEARNING_RATE))
            result["losses"].append(passed.result(timeout=_TIMEOUT_S).metrics["loss:sum"])
            stepped.result(timeout=_TIMEOUT_S)
            result["ended_s"].append(time.time())
    file.write_text(json.dumps(result))


def _group(prompt: list[int], sampled: Sequence[Any]) -> list[Any]:
    """The answers to one prompt, each pushed by how far its reward is from the group's mean, in
    spreads.
    """
    letters = [np.isin(one.tokens, range(97, 123)).mean() for one in sampled]
    rewards = np.asarray(letters)
    pushes = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return [_datum(prompt, one, float(push)) for one, push in zip(sampled, pushes, strict=True)]


def _datum(prompt: list[int], one: Any, push: float) -> Any:
    from tinker import types

    whole, before = [*prompt, *one.tokens], [0.0] * (len(prompt) - 1)
    shape = [len(whole) - 1]

    def floats(values: list[float]) -> Any:
        return types.TensorData(data=before + values, dtype="float32", shape=shape)

    return types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=whole[1:], dtype="int64", shape=shape),
            "logprobs": floats(list(one.logprobs)),
            "advantages": floats([push] * len(one.tokens)),
        },
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), [int(value) for value in sys.argv[4:]])
