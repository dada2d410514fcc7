"""Supervised and preference (DPO) training on a data set, as a client of the service.

DPO needs no loss in the service: once the margin is known, so is the gradient of
-log sigmoid(beta * margin) by each log-prob. A pair is a `cross_entropy` pass with these weights.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tinker

from slackwater.rl.advantages import Floats
from slackwater.rl.environments.data_tasks import DataTasks, Row
from slackwater.rl.grpo import Stage, Watch, adam, save_checkpoint, training_client
from slackwater.rl.recipe import Recipe
from slackwater.rl.rollout import ReferenceModel, Trajectory
from slackwater.rl.run_directory import PromptOrder, RunDirectory
from slackwater.rl.text import PlainText, text_of
from slackwater.rl.tokenizer import load_tokenizer


def run_supervised(
    recipe: Recipe,
    service: tinker.ServiceClient,
    folder: RunDirectory,
    watch: Watch,
    stage: Stage = lambda what: None,
) -> str:
    """Train to the recipe's end, resuming a checkpoint; returns the path of the final weights."""
    settings, tasks = recipe.supervised, recipe.environment
    assert isinstance(tasks, DataTasks), "the recipe has checked it"
    stage(f"a trainer to load {recipe.model.base}")
    training = training_client(recipe, service, folder.checkpoint)
    text = text_of(recipe.model.text, load_tokenizer(training, recipe.model.text))
    step = SupervisedStep(recipe, training, text)
    if recipe.method == "dpo":
        step = PreferenceStep(
            recipe, training, text, ReferenceModel(service, recipe.model.base, settings.reference)
        )
    order = PromptOrder(tasks.prompts, settings.seed)
    done = folder.checkpoint.steps_done if folder.checkpoint else 0
    for number in range(done, settings.steps):
        began_s = time.perf_counter()
        stage(f"step {number + 1}")
        uses = order.uses(number * settings.batch, settings.batch)
        metrics = step.train([tasks.rows[use.prompt] for use in uses])
        metrics["time/train_s"] = time.perf_counter() - began_s
        folder.record(number, metrics, [(use, True) for use in uses])
        watch(number, metrics)
        if number + 1 == settings.steps or (number + 1) % settings.checkpoint_every == 0:
            save_checkpoint(training, folder, number + 1, (number + 1) * settings.batch)
    return str(training.save_weights_for_sampler("final").result().path)


class SupervisedStep:
    """Cross-entropy of the answers of a batch, by token."""

    def __init__(self, recipe: Recipe, training: Any, text: PlainText) -> None:
        self._settings = recipe.supervised
        self._tasks = recipe.environment
        self._training = training
        self._text = text

    def train(self, rows: Sequence[Row]) -> dict[str, float]:
        """One optimizer step; returns its metrics."""
        trajectories = [self.demonstrate(row) for row in rows]
        tokens = sum(sum(trajectory.sampled) for trajectory in trajectories)
        data = [trajectory.cross_entropy_datum(1 / tokens) for trajectory in trajectories]
        loss_pass, norm = self._update(data)
        return {
            "loss": float(loss_pass.metrics["loss:sum"]),
            "answer/tokens": tokens / len(rows),
            "optim/grad_norm": norm,
        }

    def demonstrate(self, row: Row, column: str = "") -> Trajectory:
        """A row's prompt with an answer, as if the model had sampled it."""
        tasks = self._tasks
        assert isinstance(tasks, DataTasks)
        trajectory = Trajectory(self._text.first(tasks.observation(row)))
        answer_tokens = self._text.encode_answer(tasks.answer_of(row, column))
        trajectory.act(answer_tokens, [0.0] * len(answer_tokens))
        return trajectory

    def _update(self, data: list[tinker.Datum]) -> tuple[Any, float]:
        settings = self._settings
        loss_pass = self._training.forward_backward(data, "cross_entropy")
        step_result = self._training.optim_step(
            adam(settings.learning_rate, settings.grad_clip_norm)
        )
        return loss_pass.result(), float((step_result.result().metrics or {}).get("grad_norm", 0.0))


class PreferenceStep(SupervisedStep):
    """DPO: raise the chosen answer over the rejected one, relative to the reference model."""

    def __init__(
        self, recipe: Recipe, training: Any, text: PlainText, reference: ReferenceModel
    ) -> None:
        super().__init__(recipe, training, text)
        self._reference = reference

    def train(self, rows: Sequence[Row]) -> dict[str, float]:
        tasks = self._tasks
        assert isinstance(tasks, DataTasks)
        trajectories = [
            self.demonstrate(row, side) for row in rows for side in (tasks.chosen, tasks.rejected)
        ]
        scored = self._training.forward(
            [trajectory.cross_entropy_datum(1.0) for trajectory in trajectories], "cross_entropy"
        )
        reference = [float(row.sum()) for row in self._reference.logprobs(trajectories)]
        outputs = scored.result().loss_fn_outputs
        policy = [
            float(np.asarray(output["logprobs"].data)[np.asarray(trajectory.sampled[1:])].sum())
            for output, trajectory in zip(outputs, trajectories, strict=True)
        ]
        gains = np.asarray(policy) - np.asarray(reference)
        margins = gains[0::2] - gains[1::2]
        weights = preference_weights(margins, self._settings.beta)
        data = [
            trajectory.cross_entropy_datum(float(weight))
            for trajectory, weight in zip(trajectories, weights, strict=True)
        ]
        _, norm = self._update(data)
        return {
            "loss": float(np.logaddexp(0.0, -self._settings.beta * margins).mean()),
            "preference/accuracy": float((margins > 0).mean()),
            "preference/margin": float(margins.mean()),
            "optim/grad_norm": norm,
        }


def preference_weights(margins: Floats, beta: float) -> Floats:
    """Weights of chosen and rejected answers in turn: cross-entropy then has DPO's gradient."""
    each = beta / (1.0 + np.exp(beta * margins)) / len(margins)
    return np.stack([each, -each], axis=1).reshape(-1).astype(np.float32)
