"""GRPO from top to bottom, as a client of the service.

A step: snapshot the weights, sample groups of answers, turn rewards into advantages within each
group, and update with a clipped policy loss.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker

from slackwater.rl.actions import ActionThread
from slackwater.rl.advantages import (
    Floats,
    farthest_apart,
    group_advantages,
    is_informative,
    token_advantages,
)
from slackwater.rl.environments import playable
from slackwater.rl.recipe import Recipe
from slackwater.rl.rollout import ReferenceModel, Rollout, Trajectory, TrajectoryGroup, kl_estimate
from slackwater.rl.run_directory import PromptOrder, PromptUse, RunCheckpoint, RunDirectory
from slackwater.rl.text import Observation, PlainText, text_of
from slackwater.rl.tokenizer import load_tokenizer

ADAM_EPS = 1e-8
Watch = Callable[[int, dict[str, float]], None]
Stage = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SampledGroups:
    """The groups of one step; `kept`: the informative ones, with the answers to train on."""

    groups: list[TrajectoryGroup]
    kept: list[TrajectoryGroup]


def run(
    recipe: Recipe,
    service: tinker.ServiceClient,
    folder: RunDirectory,
    watch: Watch,
    actions: ActionThread | None = None,
    stage: Stage = lambda what: None,
) -> str:
    """Train to the recipe's end, resuming a checkpoint; returns the path of the final weights.

    `actions` runs the model's programs; `stage` is called with what the run waits for.
    """
    environment = playable(recipe.environment, actions)
    stage(f"a trainer to load {recipe.model.base}")
    training = training_client(recipe, service, folder.checkpoint)
    text = text_of(recipe.model.text, load_tokenizer(training, recipe.model.text))
    reference = None
    if recipe.grpo.kl:
        reference = ReferenceModel(service, recipe.model.base, recipe.grpo.reference)
    if folder.checkpoint is None:
        stage(f"{recipe.warm_up.steps} steps of warm-up on demonstrations")
        warm_up(recipe, training, text)
        stage("the first checkpoint")
        save_checkpoint(training, folder, steps_done=0, prompts_used=0)
    assert folder.checkpoint is not None
    prompts_used = folder.checkpoint.prompts_used
    snapshot = WeightSnapshot(training)
    snapshot.take()
    for step in range(folder.checkpoint.steps_done, recipe.grpo.steps):
        began_s = time.perf_counter()
        stage(f"the samples of step {step + 1}")
        sampler = snapshot.result()
        rollout = Rollout(sampler, environment, text, recipe.sampling, seed=recipe.grpo.seed)
        overlapped = None
        if recipe.grpo.overlap:
            tokens = _estimate_tokens(recipe, folder)
            overlapped = OverlappedUpdate(recipe, training, tokens, reference)
        sampled = _sample_groups(
            recipe, rollout, prompts_used, overlapped.add if overlapped else None
        )
        prompts_used += len(sampled.groups)
        sampled_s = time.perf_counter()
        stage(f"the update of step {step + 1}")
        is_last = step + 1 == recipe.grpo.steps
        on_queued = (lambda: None) if is_last else snapshot.take  # the last step needs no sampler
        if overlapped:
            update_metrics = overlapped.finish(on_queued)
        else:
            update_metrics = _update(recipe, training, sampled.kept, reference, on_queued)
        metrics = {
            **_rollout_metrics(sampled),
            **update_metrics,
            "time/sample_s": sampled_s - began_s,
            "time/train_s": time.perf_counter() - sampled_s,
        }
        kept = {group.use for group in sampled.kept}
        folder.record(step, metrics, [(group.use, group.use in kept) for group in sampled.groups])
        watch(step, metrics)
        is_last = is_last or _has_reached_goal(recipe, folder)
        if is_last or (step + 1) % recipe.grpo.checkpoint_every == 0:
            save_checkpoint(training, folder, step + 1, prompts_used)
        if is_last:
            break
    final = training.save_weights_for_sampler("final").result()
    return str(final.path)


def training_client(
    recipe: Recipe, service: tinker.ServiceClient, checkpoint: RunCheckpoint | None
) -> Any:
    """A training client for a new model, or for that of a checkpoint."""
    if checkpoint is not None:
        return service.create_training_client_from_state_with_optimizer(checkpoint.state_path)
    model = recipe.model
    return service.create_lora_training_client(model.base, rank=model.lora_rank, seed=model.seed)


def warm_up(recipe: Recipe, training: Any, text: PlainText) -> None:
    """Teach the format of answers by demonstrations, before any reward."""
    settings, environment = recipe.warm_up, recipe.environment
    futures = []
    for step in range(settings.steps):
        first = environment.prompts + step * settings.batch  # own prompts, beyond those of the run
        trajectories = [
            _demonstration_trajectory(environment.demonstration(prompt), text)
            for prompt in range(first, first + settings.batch)
        ]
        tokens = sum(sum(trajectory.sampled) for trajectory in trajectories)
        data = [trajectory.cross_entropy_datum(1 / tokens) for trajectory in trajectories]
        futures.append(training.forward_backward(data, "cross_entropy"))
        futures.append(training.optim_step(adam(settings.learning_rate, 1.0)))
    for future in futures:
        future.result()


def _demonstration_trajectory(
    turns: Sequence[tuple[Observation, str]], text: PlainText
) -> Trajectory:
    trajectory = Trajectory(text.first(turns[0][0]))
    for number, (observation, answer) in enumerate(turns):
        if number and isinstance(observation, str):
            trajectory.observe(text.next(observation, ended=True))
        answer_tokens = text.encode_answer(answer)
        trajectory.act(answer_tokens, [0.0] * len(answer_tokens))
    return trajectory


class WeightSnapshot:
    """The sampler of each step, requested right after the updates: its weights travel to the
    engines while the driver reads the results of the updates.

    Hazard: the SDK's call blocks, so it runs in a thread; a daemon, so that a driver that fails
    while the service is gone can exit.
    """

    def __init__(self, training: Any) -> None:
        self._training = training
        self._sampler: Future[Any] = Future()

    def take(self) -> None:
        """Request a snapshot of the weights after all updates requested so far."""
        self._sampler = Future()
        threading.Thread(target=self._take, args=(self._sampler,), daemon=True).start()

    def _take(self, sampler: Future[Any]) -> None:
        try:
            sampler.set_result(self._training.save_weights_and_get_sampling_client())
        except BaseException as error:  # noqa: BLE001  (the caller of `result` gets it)
            sampler.set_exception(error)

    def result(self) -> Any:
        return self._sampler.result()


def _sample_groups(
    recipe: Recipe,
    rollout: Rollout,
    prompts_used: int,
    on_kept: Callable[[TrajectoryGroup], None] | None = None,
) -> SampledGroups:
    """Sample groups until enough are informative, or up to the step's limit."""
    grpo = recipe.grpo
    order = PromptOrder(recipe.environment.prompts, grpo.seed)
    sampled = SampledGroups([], [])
    limit = grpo.max_groups if grpo.dynamic_sampling else grpo.groups
    while len(sampled.kept) < grpo.groups and len(sampled.groups) < limit:
        count = min(grpo.groups - len(sampled.kept), limit - len(sampled.groups))
        uses: Sequence[PromptUse] = order.uses(prompts_used + len(sampled.groups), count)
        position = {use: number for number, use in enumerate(uses)}
        groups: list[TrajectoryGroup] = []
        kept: list[TrajectoryGroup] = []
        completed = rollout.iter_groups(uses, grpo.group_size)
        for group in order_by_prompt(completed, uses) if grpo.in_order else completed:
            groups.append(group)
            if is_informative(group.rewards):
                kept.append(group.select(farthest_apart(group.rewards, answers_per_group(recipe))))
                if on_kept is not None:
                    on_kept(kept[-1])
        sampled.groups.extend(sorted(groups, key=lambda group: position[group.use]))
        sampled.kept.extend(sorted(kept, key=lambda group: position[group.use]))
    return sampled


def order_by_prompt(
    completed: Iterator[TrajectoryGroup], uses: Sequence[PromptUse]
) -> Iterator[TrajectoryGroup]:
    """Yield each group once it and all before it are complete."""
    early: dict[PromptUse, TrajectoryGroup] = {}
    for use in uses:
        while use not in early:
            group = next(completed)
            early[group.use] = group
        yield early.pop(use)


def answers_per_group(recipe: Recipe) -> int:
    """The number of answers to train on per group."""
    return recipe.grpo.train_on or recipe.grpo.group_size


class PolicyUpdate:
    """One optimizer step, of one pass or several.

    `tokens` normalizes the advantages of every pass; by default the pass's own number does.
    """

    def __init__(
        self,
        recipe: Recipe,
        training: Any,
        reference: ReferenceModel | None = None,
        tokens: int | None = None,
    ) -> None:
        self._recipe = recipe
        self._training = training
        self._reference = reference
        self._tokens = tokens
        self._passes: list[tuple[Any, Sequence[TrajectoryGroup]]] = []
        self._kls: list[float] = []

    def begin_pass(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Request the gradients of these groups."""
        data = policy_data(self._recipe, groups, self._tokens, self._distances(groups))
        grpo, clipping = self._recipe.grpo, {}
        if grpo.loss != "importance_sampling":
            clipping = {"clip_low_threshold": grpo.clip_low, "clip_high_threshold": grpo.clip_high}
        self._passes.append((self._training.forward_backward(data, grpo.loss, clipping), groups))

    def _distances(self, groups: Sequence[TrajectoryGroup]) -> list[Floats] | None:
        """Log-prob differences to the reference by token."""
        if self._reference is None:
            return None
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        policy = [trajectory.sampled_logprobs for trajectory in trajectories]
        reference = self._reference.logprobs(trajectories)
        self._kls.append(kl_estimate(policy, reference))
        return [own - other for own, other in zip(policy, reference, strict=True)]

    def begin_step(self) -> None:
        """Request the update of the weights, after all passes."""
        grpo = self._recipe.grpo
        self._step = self._training.optim_step(adam(grpo.learning_rate, grpo.grad_clip_norm))

    def metrics(self) -> dict[str, float]:
        """Wait for the passes and the step."""
        done = [(loss_pass.result(), groups) for loss_pass, groups in self._passes]
        found = {
            "optim/loss": float(sum(loss_pass.metrics["loss:sum"] for loss_pass, _ in done)),
            "optim/grad_norm": (self._step.result().metrics or {}).get("grad_norm", 0.0),
            "optim/sampler_kl": float(np.mean([_sampler_kl(*loss_pass) for loss_pass in done])),
        }
        return found | ({"reference/kl": float(np.mean(self._kls))} if self._kls else {})


class OverlappedUpdate(PolicyUpdate):
    """An update that starts in micro-batches of `overlap` before all groups exist."""

    def __init__(
        self,
        recipe: Recipe,
        training: Any,
        expected_tokens: int,
        reference: ReferenceModel | None = None,
    ) -> None:
        super().__init__(recipe, training, reference, expected_tokens)
        self._pending: list[TrajectoryGroup] = []
        self._began_s: float | None = None
        self._last_group_s = 0.0

    def add(self, group: TrajectoryGroup) -> None:
        """Add a complete group; train once a micro-batch is complete."""
        self._last_group_s = time.perf_counter()
        self._pending.append(group)
        if sum(len(g.trajectories) for g in self._pending) >= self._recipe.grpo.overlap:
            self._begin_pending()

    def finish(self, on_queued: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Train on the rest, then update the weights; calls `on_queued` once all is requested."""
        if self._pending:
            self._begin_pending()
        if not self._passes:
            on_queued()
            return {"optim/updates": 0.0}
        self.begin_step()
        on_queued()
        return {
            "optim/updates": 1.0,
            "optim/passes": float(len(self._passes)),
            "time/overlap_s": max(self._last_group_s - (self._began_s or 0.0), 0.0),
            **self.metrics(),
        }

    def _begin_pending(self) -> None:
        groups, self._pending = self._pending, []
        self.begin_pass(groups)
        if self._began_s is None:
            self._began_s = time.perf_counter()


def _estimate_tokens(recipe: Recipe, folder: RunDirectory) -> int:
    """The step's expected number of tokens: the last step's, or the maximum."""
    grpo = recipe.grpo
    for row in reversed(folder.metrics()):
        if row.get("groups/kept", 0.0) > 0:
            return max(
                round(row["groups/kept"] * answers_per_group(recipe) * row["answer/tokens"]), 1
            )
    return grpo.groups * answers_per_group(recipe) * recipe.sampling.max_tokens


def _update(
    recipe: Recipe,
    training: Any,
    groups: Sequence[TrajectoryGroup],
    reference: ReferenceModel | None,
    on_queued: Callable[[], None],
) -> dict[str, float]:
    """One optimizer step per share of the groups; calls `on_queued` once all are requested."""
    updates = []
    for share in (groups[number :: recipe.grpo.updates] for number in range(recipe.grpo.updates)):
        if share:
            updates.append(PolicyUpdate(recipe, training, reference))
            updates[-1].begin_pass(share)
            updates[-1].begin_step()
    on_queued()
    if not updates:
        return {"optim/updates": 0.0}
    rows = [update.metrics() for update in updates]
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    return {"optim/updates": float(len(rows)), **means}


def policy_data(
    recipe: Recipe,
    groups: Sequence[TrajectoryGroup],
    tokens: int | None = None,
    distances: Sequence[Floats] | None = None,
) -> list[tinker.Datum]:
    """Trajectories with token advantages over `tokens` (default: all), less `kl` * `distances`."""
    grpo = recipe.grpo
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    advantages = np.concatenate(
        [group_advantages(group.rewards, by_spread=grpo.by_spread) for group in groups]
    )
    logprobs = [trajectory.sampled_logprobs for trajectory in trajectories]
    weights = token_advantages(advantages.tolist(), logprobs, grpo.entropy_bonus, tokens)
    if distances is not None:
        penalties = token_advantages([0.0] * len(trajectories), distances, grpo.kl, tokens)
        weights = [weight + penalty for weight, penalty in zip(weights, penalties, strict=True)]
    pairs = zip(trajectories, weights, strict=True)
    return [trajectory.policy_datum(token_weights) for trajectory, token_weights in pairs]


def _sampler_kl(loss_pass: Any, groups: Sequence[TrajectoryGroup]) -> float:
    """The mean difference of the learner's and the sampler's log-probs of sampled tokens."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    gaps = [
        np.asarray(trajectory.logprobs[1:]) - np.asarray(output["logprobs"].data)
        for output, trajectory in zip(loss_pass.loss_fn_outputs, trajectories, strict=True)
    ]
    masks = [np.asarray(trajectory.sampled[1:]) for trajectory in trajectories]
    return float(np.concatenate(gaps)[np.concatenate(masks)].mean())


def adam(learning_rate: float, grad_clip_norm: float) -> tinker.AdamParams:
    """The optimizer's settings of one step."""
    return tinker.AdamParams(
        learning_rate=learning_rate,
        beta1=0.9,
        beta2=0.95,
        eps=ADAM_EPS,
        grad_clip_norm=grad_clip_norm,
    )


def _rollout_metrics(sampled: SampledGroups) -> dict[str, float]:
    trajectories = [t for group in sampled.groups for t in group.trajectories]
    surprise = np.concatenate([-t.sampled_logprobs for t in trajectories])
    return {
        "reward": float(np.mean([t.reward for t in trajectories])),
        "reward/best": float(np.mean([max(group.rewards) for group in sampled.groups])),
        "groups/drawn": float(len(sampled.groups)),
        "groups/kept": float(len(sampled.kept)),
        "answer/tokens": float(np.mean([sum(t.sampled) for t in trajectories])),
        "answer/turns": float(np.mean([t.turns for t in trajectories])),
        "answer/entropy": float(surprise.mean()),
    }


def _has_reached_goal(recipe: Recipe, folder: RunDirectory) -> bool:
    goal = recipe.grpo.stop_at_reward
    recent = [row["reward"] for row in folder.metrics()[-10:]]
    return goal is not None and len(recent) == 10 and float(np.mean(recent)) >= goal


def save_checkpoint(
    training: Any, folder: RunDirectory, steps_done: int, prompts_used: int
) -> None:
    """Save the state durably in the service, then record its path in the folder."""
    saved = training.save_state(f"step-{steps_done:06d}").result()
    folder.keep(RunCheckpoint(steps_done, prompts_used, saved.path))
