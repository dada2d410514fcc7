"""One TRL GRPO job whose phases run under permits, in a process of its own: prints one JSON object.

    python -m benchmarks.state.trl_job '{"name": "a", "seed": 0, "steps": 12, ...}'

GRPOTrainer is subclassed, not patched: generation is its rollout phase, and everything from there
to the end of the optimizer's step its train phase. `cores` are the processor for each of them.
"""

import importlib
import json
import sys
import tempfile
import time
from typing import Any

import torch

import slackwater
from benchmarks.training.grpo_peer import workload
from benchmarks.training.grpo_step import StepShape

trl: Any = importlib.import_module("trl")  # an extra: absent where only types are checked
transformers: Any = importlib.import_module("transformers")


class SharedTrainer(trl.GRPOTrainer):  # type: ignore[misc]  # its base is an extra without types
    """Phases of TRL's own trainer."""

    def share(self, rollout_cores: set[int], train_cores: set[int]) -> None:
        self.rollout = slackwater.phase("rollout", cores=rollout_cores)
        self.train_phase = slackwater.phase("train", cores=train_cores)
        self.spent_s = {"rollout": 0.0, "train": 0.0}
        self.in_train: float | None = None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self.rollout:
            began_s = time.perf_counter()
            found = super()._generate_and_score_completions(inputs)
            self.spent_s["rollout"] += time.perf_counter() - began_s
        return found

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        found = super()._prepare_inputs(generation_batch)
        if self.in_train is None:
            self.train_phase.__enter__()
            self.in_train = time.perf_counter()
        return found

    def end_train(self) -> None:
        if self.in_train is not None:
            self.spent_s["train"] += time.perf_counter() - self.in_train
            self.in_train = None
            self.train_phase.__exit__(None, None, None)


class StepEnd(transformers.TrainerCallback):  # type: ignore[misc]  # its base is an extra without types
    """The optimizer has stepped: the train phase is over."""

    trainer: SharedTrainer
    began_s = ended_s = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began_s = time.time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trainer.end_train()
        self.ended_s = time.time()


def main() -> None:
    options = json.loads(sys.argv[1])
    shape, steps = StepShape(**options["shape"]), int(options["steps"])
    rewards: list[float] = []
    end = StepEnd()
    with tempfile.TemporaryDirectory() as folder:
        made = workload(folder, shape, steps, options["seed"], rewards)
        trainer = SharedTrainer(**made, callbacks=[end])
        trainer.share(set(options["rollout_cores"]), set(options["train_cores"]))
        end.trainer = trainer
        slackwater.join(
            options["name"], iterations=steps, slo=options["slo"], profile=options.get("profile")
        )
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()  # both begin together
        trainer.train()
    weights = torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])
    found = {
        "began_s": end.began_s,
        "ended_s": end.ended_s,
        "rewards": rewards,
        "phases_s": trainer.spent_s,
        "weights_sum": float(weights.double().sum()),
        "weights_norm": float(weights.double().norm()),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
