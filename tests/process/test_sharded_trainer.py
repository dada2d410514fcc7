"""A service whose trainer is spread over two devices, and the ranks that it loses."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from harness.ports import free_port
from slackwater.model.adam import Adam
from slackwater.nets.lora import LoraSpec
from slackwater.training.datum import Datum
from slackwater.training.trainer import Trainer
from slackwater.zoo.tiny import make_model

from .service_process import READY_S, ServiceProcess, gone, wait_for
from .test_switched_models import TEXT, example

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

RANKS = {"full": 0, "lora": 4}
STEPS = 2
RATE = 1e-3
CLOSE = 1e-5
# Of a collective. A busy machine that takes longer loses ranks, which changes nothing either.
RANK_DEADLINE_S = 8


class Learner:
    """One model of the service, and the losses that it has had."""

    def __init__(self, sdk: tinker.ServiceClient, rank: int) -> None:
        self.client = sdk.create_lora_training_client(base_model="tiny", rank=rank, seed=3)
        self.losses: list[float] = []

    def learn(self, hurt: Callable[[], object] = lambda: None) -> None:
        """One step; `hurt` happens while its pass is under way or about to be."""
        step = len(self.losses)
        passed = self.client.forward_backward([example(step), example(step + 9)], "cross_entropy")
        hurt()
        self.losses.append(passed.result(READY_S).metrics["loss:sum"])
        adam = types.AdamParams(learning_rate=RATE, eps=1e-8)
        self.client.optim_step(adam).result(READY_S)

    def sampled(self) -> tuple[list[int], list[float]]:
        """What the published weights say: greedy, so they are the same where the weights are."""
        sampler = self.client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=4, temperature=0.0)
        prompt = types.ModelInput.from_ints(TEXT)
        (said,) = sampler.sample(prompt, 1, params).result(READY_S).sequences
        assert said.logprobs is not None
        return list(said.tokens), list(said.logprobs)


def losses_of_one_rank(model: Path, rank: int) -> list[float]:
    trainer = Trainer.create(model, LoraSpec(rank, seed=3) if rank else None, 3)
    found = []
    for step in range(STEPS):
        data = []
        for each in (example(step), example(step + 9)):
            inputs = {name: held.to_numpy() for name, held in each.loss_fn_inputs.items()}
            data.append(Datum(np.asarray(each.model_input.to_ints()), inputs))
        found.append(trainer.forward_backward(data, "cross_entropy", {}).metrics["loss:sum"])
        trainer.optim_step(Adam(learning_rate=RATE, eps=1e-8))
    return found


def ranks_of(worker_pid: int) -> list[int]:
    """The processes of the worker whose rank 0 that is, by rank."""
    own = Path(f"/proc/{worker_pid}")
    parent = own.joinpath("stat").read_text().rpartition(")")[2].split()[1]
    command = own.joinpath("cmdline").read_bytes()
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()  # as started
    commands = {each: Path(f"/proc/{each}/cmdline").read_bytes() for each in children}
    return [int(each) for each in children if commands[each] == command]


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two key/value heads, one for each rank."""
    directory = tmp_path_factory.mktemp("models") / "small"
    make_model("small", directory, 0)
    return directory


def test_lost_ranks_change_no_bit(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLACKWATER_RANK_DEADLINE_S", str(RANK_DEADLINE_S))
    spread = ("--devices", "3", "--engines", "1", "--trainer-layout", "dp=2")
    service = ServiceProcess(tmp_path / "state", small_model, free_port(), *spread)
    service.start()
    hurt_pids: list[int] = []

    def hurt(rank: int, number: signal.Signals) -> None:
        (worker,) = (pid for name, pid in service.status()["pids"].items() if "trainer" in name)
        pids = ranks_of(worker)
        assert len(pids) == 2
        os.kill(pids[rank], number)
        hurt_pids.extend(pids)

    try:
        service.wait_for_workers()
        sdk = tinker.ServiceClient(base_url=service.url, api_key=service.key)
        calm = {kind: Learner(sdk, rank) for kind, rank in RANKS.items()}
        hit = {kind: Learner(sdk, rank) for kind, rank in RANKS.items()}
        for learner in calm.values():
            for _ in range(STEPS):
                learner.learn()
        hit["full"].learn()
        hit["lora"].learn(lambda: hurt(1, signal.SIGKILL))
        hit["full"].learn(lambda: hurt(1, signal.SIGSTOP))
        hit["lora"].learn()
        wait_for("every hurt rank's group to end", lambda: all(map(gone, hurt_pids)))
        for kind, rank in RANKS.items():
            assert hit[kind].losses == calm[kind].losses
            assert hit[kind].sampled() == calm[kind].sampled()
            alone = losses_of_one_rank(small_model, rank)
            assert hit[kind].losses == pytest.approx(alone, rel=CLOSE)
    finally:
        service.stop()
