"""One step of the coding recipe: with the broker, and with a sandbox per trajectory on the same
cores.

A sandbox per trajectory is what a pod per trajectory is: it holds one core from before the
trajectory's first token until after its reward, so no more trajectories are under way than there
are cores. A second peer asks for half a core, as the pods of ARL-Tangram 6.1 do, so twice as many
are under way. Everything else is the same: the service, the engine, the programs, the trainer's
update.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tinker

from benchmarks.options import BenchOptions
from slackwater.cli.own_service import own_service
from slackwater.rl.actions import ActionThread
from slackwater.rl.environments import playable
from slackwater.rl.environments.episode import EnvironmentReply, EpisodeEnvironment
from slackwater.rl.grpo import policy_data, warm_up
from slackwater.rl.recipe import Recipe, load_recipe
from slackwater.rl.rollout import Rollout, TrajectoryGroup
from slackwater.rl.run_directory import PromptOrder, PromptUse
from slackwater.rl.sdk_client import closing
from slackwater.rl.text import text_of
from slackwater.zoo.tiny import make_model

_SETTINGS = ("environment.own_environment=true", "grpo.group_size=8")


def coding_step(options: BenchOptions) -> dict[str, object]:
    groups, steps = (2, 1) if options.quick else (6, 3)
    recipe = load_recipe(
        "coding", [*_SETTINGS, f"grpo.groups={groups}", f"grpo.max_groups={groups}"]
    )
    folder = Path(tempfile.mkdtemp(prefix="slackwater-bench-"))
    places = Path(tempfile.mkdtemp(prefix="slackwater-bench-", dir="/var/tmp"))
    places.chmod(0o711)
    try:
        make_model("tiny", folder / "tiny", options.seed)
        sandboxes = ("--sandboxes", "1", "--sandbox-folder", str(places))
        with own_service(folder / "service", "tiny", folder / "tiny", *sandboxes) as (url, key):
            return _compared(recipe, url, key, steps)
    finally:
        for path in (folder, places):
            shutil.rmtree(path, ignore_errors=True)


def _compared(recipe: Recipe, url: str, key: str, steps: int) -> dict[str, object]:
    cores = len(os.sched_getaffinity(0))
    brokered: list[float] = []
    reserved: dict[int, list[float]] = {1: [], 2: []}  # by how many share a core
    with (
        ActionThread(url, key, job="bench") as actions,
        closing(tinker.ServiceClient(base_url=url, api_key=key)) as service,
    ):
        training = service.create_lora_training_client(recipe.model.base, rank=0, seed=0)
        text = text_of("plain", training.get_tokenizer())
        warm_up(recipe, training, text)
        environment = playable(recipe.environment, actions)
        first: Any = (
            training.save_weights_and_get_sampling_client()
        )  # what is compiled is compiled now
        uses = PromptOrder(environment.prompts, 1).uses(0, 1)
        Rollout(first, environment, text, recipe.sampling, seed=0).groups(uses, 8)
        for step in range(steps):  # in turns, so that a busy spell of the machine hits both
            sampler: Any = training.save_weights_and_get_sampling_client()
            rollout = Rollout(sampler, environment, text, recipe.sampling, seed=step)
            uses = PromptOrder(environment.prompts, 0).uses(
                step * recipe.grpo.groups, recipe.grpo.groups
            )
            brokered.append(_timed(recipe, training, partial(rollout.groups, uses, 8)))
            for sharing, took in reserved.items():
                pods = Pods(rollout, environment, cores * sharing)
                took.append(_timed(recipe, training, partial(pods.groups, uses, 8)))
    return {
        "coding_trajectories_per_step": recipe.grpo.groups * recipe.grpo.group_size,
        "coding_step_s_broker": median(brokered),
        "coding_step_s_sandbox_per_trajectory": median(reserved[1]),
        "coding_step_speedup": _gain(reserved[1], brokered),
        "coding_step_s_half_core_per_trajectory": median(reserved[2]),
        "coding_step_speedup_half_core": _gain(reserved[2], brokered),
    }


def _gain(peers_s: Sequence[float], ours_s: Sequence[float]) -> float:
    return median(peer_s / our_s for peer_s, our_s in zip(peers_s, ours_s, strict=True))


def _timed(recipe: Recipe, training: Any, sample: Any) -> float:
    """Sample, run, reward and update."""
    began_s = time.perf_counter()
    groups = sample()
    passed = training.forward_backward(policy_data(recipe, groups), "ppo")
    training.optim_step(tinker.AdamParams(learning_rate=0.0)).result()
    passed.result()
    return time.perf_counter() - began_s


class Pods:
    """So many trajectories at a time; each has its place from beginning to end."""

    def __init__(self, rollout: Rollout, environment: EpisodeEnvironment, places: int) -> None:
        self._rollout = rollout
        self._environment = environment
        self._places = places

    def groups(self, uses: Sequence[PromptUse], size: int) -> list[TrajectoryGroup]:
        with ThreadPoolExecutor(self._places) as pods:
            members = {
                (use, number): pods.submit(self._life, use, number)
                for use in uses
                for number in range(size)
            }
            return [
                TrajectoryGroup(use, tuple(members[use, number].result() for number in range(size)))
                for use in uses
            ]

    def _life(self, use: PromptUse, number: int) -> Any:
        member = self._rollout.start(use.prompt, number)
        while True:
            answer = self._rollout.sample(use, member, num_samples=1).result().sequences[0]
            reply = self._rollout.submit_answer(member, answer)
            heard = reply.result() if isinstance(reply, Future) else reply
            assert isinstance(heard, EnvironmentReply)
            if self._rollout.apply_reply(member, heard):
                return member.trajectory
