"""The lender's live body: which job borrows, from when until when."""

import asyncio
from collections.abc import Callable

import pytest

from slackwater.control.lending.lender import Lender, LenderSettings
from slackwater.model.ids import JobId, WorkerId
from slackwater.policy.serving.lender_choice import LenderRule
from slackwater.runtime.bodies.lending import LendingBody, Offer
from slackwater.wire import lending, messages

ONE, TWO = JobId("one"), JobId("two")
CHAT = [WorkerId("chat-0"), WorkerId("chat-1")]
IDLE = {"slo_requests": 0.0, "slo_met": 0.0, "needed_s": 0.0, "kv_share": 0.1, "promise_kept": 1.0}


class Stage:
    """A body, the jobs with live turns, and what workers were told."""

    def __init__(self, workers: int) -> None:
        self.live: set[JobId] = set()
        self.told: list[tuple[WorkerId, messages.Message]] = []
        settings = LenderSettings(LenderRule(rest_s=0.1), review_every_s=0.1)
        self.body = LendingBody(
            lambda worker, message: self.told.append((worker, message)),
            Lender(settings),
            {"policy": Offer("v0", "slackwater:models/policy")},
            lambda: self.live,
        )
        facts = messages.EngineFacts("chat", 8, 1000, 1000, 1, lends=True)
        for worker in CHAT[:workers]:
            self.body.joined(worker, facts)
            self.body.heartbeat(worker, IDLE)

    def rolls_out(self, job: JobId, base_model: str = "policy") -> None:
        self.live.add(job)
        self.body.rolls_out(job, base_model)

    def said(self) -> list[tuple[WorkerId, messages.Message]]:
        told, self.told = self.told, []
        return told


def on_loop(story: Callable[[], None]) -> None:
    """The body asks the event loop for the time."""

    async def tell() -> None:
        story()

    asyncio.run(tell())


def lent(job: JobId) -> lending.LendTo:
    return lending.LendTo(job, "policy", "v0", "slackwater:models/policy")


def test_the_first_live_turn_of_a_job_borrows_for_that_job_alone() -> None:
    def story() -> None:
        stage = Stage(workers=2)
        stage.rolls_out(ONE)
        stage.rolls_out(ONE)
        assert stage.said() == [(worker, lent(ONE)) for worker in CHAT]
        stage.rolls_out(TWO)
        assert stage.said() == [], "both devices are lent"
        assert stage.body.lent() == dict.fromkeys(CHAT, ONE)

    on_loop(story)


def test_turns_of_the_served_model_borrow_nothing() -> None:
    def story() -> None:
        stage = Stage(workers=1)
        stage.rolls_out(ONE, "chat")
        assert stage.said() == []

    on_loop(story)


def test_a_job_that_trains_gives_its_devices_back_and_another_job_gets_them() -> None:
    def story() -> None:
        stage = Stage(workers=1)
        stage.rolls_out(ONE)
        stage.rolls_out(TWO)
        stage.said()
        stage.body.trains(ONE)
        assert stage.said() == [], "it rolls out while it trains"
        stage.live.discard(ONE)
        stage.body.trains(ONE)
        ((worker, message),) = stage.said()
        assert isinstance(message, lending.TakeBack)
        stage.body.over(worker, "")
        assert stage.said() == [(worker, lent(TWO))]

    on_loop(story)


def test_the_first_turn_after_an_optimizer_step_begins_the_next_step_of_its_job() -> None:
    def story() -> None:
        stage = Stage(workers=1)
        stage.rolls_out(ONE)
        stage.said()
        stage.body.stepped(ONE)
        stage.body.stepped(TWO)
        assert stage.said() == []
        stage.rolls_out(ONE)
        assert stage.said() == [(CHAT[0], lending.StepBegan())]
        stage.rolls_out(ONE)
        assert stage.said() == []

    on_loop(story)


def test_a_worker_that_comes_later_is_lent_to_a_job_that_rolls_out_already() -> None:
    def story() -> None:
        stage = Stage(workers=0)
        stage.rolls_out(ONE)
        facts = messages.EngineFacts("chat", 8, 1000, 1000, 1, lends=True)
        for worker in CHAT:
            stage.body.joined(worker, facts)
            stage.body.heartbeat(worker, IDLE)
        assert stage.said() == [(worker, lent(ONE)) for worker in CHAT]

    on_loop(story)


@pytest.mark.parametrize("error", ["", "the model does not fit"])
def test_a_device_that_is_not_lent_any_more_is_not_shown_as_lent(error: str) -> None:
    def story() -> None:
        stage = Stage(workers=1)
        stage.rolls_out(ONE)
        stage.body.over(CHAT[0], error)
        assert stage.body.lent() == {}
        assert stage.body.refusals == ({CHAT[0]: error} if error else {})

    on_loop(story)


def test_a_service_that_breaks_its_promise_gets_its_device_back_and_status_says_why() -> None:
    def story() -> None:
        stage = Stage(workers=1)
        stage.rolls_out(ONE)
        stage.said()
        stage.body.heartbeat(CHAT[0], {**IDLE, "promise_kept": 0.0})
        ((worker, message),) = stage.said()
        assert (worker, type(message)) == (CHAT[0], lending.TakeBack)
        stage.body.over(worker, "")
        assert "promise" in stage.body.refusals[worker]
        assert stage.body.lent() == {}

    on_loop(story)
