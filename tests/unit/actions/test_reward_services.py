"""Reward models that the broker holds for real: a tiny model per service, restored, evicted and
asked through the embedded engine.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from harness.broker_checks import check_broker
from slackwater.control.actions import commands as do
from slackwater.control.actions import events as on
from slackwater.control.actions.broker import ActionBroker
from slackwater.engine.config import EngineConfig
from slackwater.model.action import ActionSpec, OutcomeKind, WorkerCapacity
from slackwater.model.amounts import GPUS, Amounts, Need
from slackwater.model.errors import UnavailableError
from slackwater.model.ids import ActionId, JobId, NodeId, ServiceName
from slackwater.worker.reward_worker import RewardServices
from slackwater.zoo.tiny import make_model

NODE = NodeId("gpu-0")
NAMES = tuple(ServiceName(name) for name in ("judge", "teacher", "critic"))
CONFIG = EngineConfig(kv_bytes=4 << 20, max_running=4, max_step_tokens=64)
TEXT = tuple(range(20, 60))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[ServiceName, Path]:
    folder = tmp_path_factory.mktemp("rewards")
    for seed, name in enumerate(NAMES):
        make_model("tiny", folder / name, seed)
    return {name: folder / name for name in NAMES}


class Body:
    """Carries out what the broker says, at once; scores come back as outcomes."""

    def __init__(self, holder: RewardServices, models: dict[ServiceName, Path], gpus: int) -> None:
        self.holder = holder
        self.broker = ActionBroker()
        self.asked: dict[ActionId, ServiceName] = {}
        self.scores: dict[ActionId, float] = {}
        self.outcomes: Counter[ActionId] = Counter()
        self.did: list[tuple[str, ServiceName, int]] = []
        self.running: list[do.StartAction] = []
        self.now_s = 0.0
        declared = [holder.stage(name, model) for name, model in models.items()]
        for service in declared:
            self.tell(on.ServiceDeclared(0.0, service))
        room = max(service.degrees[0].gpu_mib for service in declared)  # for one of them
        self.tell(on.WorkerJoined(0.0, NODE, WorkerCapacity((), 0, gpus, room)))

    def ask(self, number: int, service: ServiceName) -> ActionId:
        self.now_s += 1.0
        name = ActionId(f"score-{number}")
        self.asked[name] = service
        need = Need(GPUS, Amounts.exactly(1))
        spec = ActionSpec(name, JobId("job"), "score", (need,), service=service)
        self.tell(on.ActionSubmitted(self.now_s, spec))
        return name

    def finish(self) -> None:
        """The oldest that runs is scored."""
        self.now_s += 1.0
        start = self.running.pop(0)
        service = self.asked[start.spec.action]
        self.scores[start.spec.action] = float(
            np.mean(self.holder.logprobs(service, start.grant.gpus, TEXT))
        )
        done = on.ActionFinished(
            self.now_s, start.spec.action, start.attempt, OutcomeKind.DONE, 0.1
        )
        self.tell(done)

    def tell(self, event: on.Event) -> None:
        for command in self.broker.handle(event):
            match command:
                case do.RestoreService(_, gpus, service):
                    self.holder.restore(service, gpus)
                    self.did.append(("restore", service, gpus[0]))
                case do.EvictService(_, gpus, service):
                    self.holder.evict(service, gpus)
                    self.did.append(("evict", service, gpus[0]))
                case do.StartAction():
                    self.running.append(command)
                case do.EndAction(action, _):
                    self.outcomes[action] += 1
        check_broker(self.broker)


def test_services_share_devices_and_every_score_is_its_own_models(
    models: dict[ServiceName, Path],
) -> None:
    body = Body(RewardServices(["cpu", "cpu"], CONFIG), models, gpus=2)
    order = [NAMES[number % 3] for number in range(12)]
    for number, service in enumerate(order):
        body.ask(number, service)
    while body.running:
        body.finish()
    assert set(body.outcomes.values()) == {1}
    assert len(body.outcomes) == 12
    by_service = {
        service: {body.scores[name] for name, asked in body.asked.items() if asked == service}
        for service in NAMES
    }
    assert all(len(scores) == 1 for scores in by_service.values())
    assert len(set.union(*by_service.values())) == 3
    assert ("evict", NAMES[0], 0) in body.did or ("evict", NAMES[0], 1) in body.did
    assert len(sorted(body.holder.resident)) <= 2


def test_a_service_that_lies_ready_is_not_restored_and_the_longest_unused_goes_first(
    models: dict[ServiceName, Path],
) -> None:
    body = Body(RewardServices(["cpu", "cpu"], CONFIG), models, gpus=2)
    judge, teacher, critic = NAMES
    for number, service in enumerate((judge, teacher, judge, judge)):
        body.ask(number, service)
        body.finish()
    assert [kind for kind, _, _ in body.did] == ["restore", "restore"]
    body.ask(9, critic)
    body.finish()
    assert body.did[2:] == [("evict", teacher, 1), ("restore", critic, 1)]
    assert sorted(body.holder.resident) == [(critic, 1), (judge, 0)]


def test_a_service_that_is_not_there_says_so(models: dict[ServiceName, Path]) -> None:
    holder = RewardServices(["cpu"], CONFIG)
    declared = holder.stage(NAMES[0], models[NAMES[0]])
    assert declared.degrees[0].restore_s > 0
    with pytest.raises(UnavailableError, match="restore it first"):
        holder.logprobs(NAMES[0], (0,), TEXT)
