"""The lender's live body: which job borrows, from when until when."""

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from slackwater.control.fleet.controller import FleetController
from slackwater.control.jobs.events import JobTrained
from slackwater.control.lending.demand import QUIET_S
from slackwater.control.lending.events import ServingNodeReported
from slackwater.control.lending.lender import LenderSettings, LendingController
from slackwater.control.rollout.facts import TurnClosed, TurnOpened
from slackwater.control.steps.events import DevicesGranted
from slackwater.model.ids import JobId, NodeId, WorkerId
from slackwater.policy.serving.lender_choice import LenderRule
from slackwater.runtime.executors.serving import Offer, ServingExecutor
from slackwater.runtime.live_driver import live_driver, loop_time
from slackwater.wire import lending, messages

ONE, TWO = JobId("one"), JobId("two")
CHAT = [WorkerId("chat-0"), WorkerId("chat-1")]
IDLE = {
    "slo_requests": 0.0,
    "slo_met": 0.0,
    "needed_s": 0.0,
    "rollout_s": 0.0,
    "lent": 0.0,
    "kv_share": 0.1,
    "promise_kept": 1.0,
}


class Stage:
    """Serving workers under the fleet controller, and what they were told."""

    def __init__(self, workers: int) -> None:
        self.told: list[tuple[WorkerId, messages.Message]] = []
        self.content = True
        settings = LenderSettings(LenderRule(rest_s=0.1), review_every_s=0.1)
        self.controller = FleetController(lending=LendingController(["policy"], settings))
        self.runtime = live_driver(self.controller)
        self.body = ServingExecutor(
            self.runtime,
            lambda worker, message: self.told.append((worker, message)),
            {"policy": Offer("v0", "slackwater:models/policy")},
            lambda now_s: self.content,
        )
        facts = messages.EngineFacts("chat", 8, 1000, 1000, 1, lends=True)
        for worker in CHAT[:workers]:
            self.body.add_worker(worker, facts)
            self.body.record_heartbeat(worker, IDLE)

    def rolls_out(self, job: JobId, base_model: str = "policy") -> None:
        """The job has one more live turn."""
        self.runtime.feed(TurnOpened(loop_time(), job, base_model))

    def ends_turn(self, job: JobId) -> None:
        self.runtime.feed(TurnClosed(loop_time(), job, "policy"))

    def trains(self, job: JobId) -> None:
        """A trainer has its devices for the job."""
        self.runtime.feed(DevicesGranted(loop_time(), WorkerId("trainer-0"), job))

    def stepped(self, job: JobId) -> None:
        self.runtime.feed(JobTrained(loop_time(), job, 1.0, ends_step=True))

    def said(self) -> list[tuple[WorkerId, messages.Message]]:
        self.controller.check_integrity()
        told, self.told = self.told, []
        return told


def on_loop(story: Callable[[], None]) -> None:
    """The body asks the event loop for the time."""

    async def tell() -> None:
        story()

    asyncio.run(tell())


def lent(job: JobId) -> lending.LendNode:
    return lending.LendNode(job, "policy", "v0", "slackwater:models/policy")


def test_the_first_live_turn_of_a_job_borrows_for_that_job_alone() -> None:
    def story() -> None:
        stage = Stage(workers=2)
        stage.rolls_out(ONE)
        stage.rolls_out(ONE)
        assert stage.said() == [(worker, lent(ONE)) for worker in CHAT]
        stage.rolls_out(TWO)
        assert stage.said() == [], "both devices are lent"
        assert stage.body.borrowers == dict.fromkeys(CHAT, ONE)

    on_loop(story)


def test_nothing_is_lent_while_users_wait_too_long_whatever_workers_say() -> None:
    def story() -> None:
        stage = Stage(workers=1)
        stage.content = False
        stage.body.record_heartbeat(CHAT[0], IDLE)
        stage.rolls_out(ONE)
        assert stage.said() == []
        stage.content = True
        stage.body.record_heartbeat(CHAT[0], IDLE)
        assert stage.said() == [(CHAT[0], lent(ONE))]
        stage.content = False
        stage.body.record_heartbeat(CHAT[0], IDLE)
        ((worker, message),) = stage.said()
        assert worker == CHAT[0]
        assert isinstance(message, lending.ReclaimNode)

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
        stage.trains(ONE)
        assert stage.said() == [], "it rolls out while it trains"
        stage.ends_turn(ONE)
        stage.trains(ONE)
        ((worker, message),) = stage.said()
        assert isinstance(message, lending.ReclaimNode)
        stage.body.end_loan(worker, "")
        assert stage.said() == [(worker, lent(TWO))]
        assert stage.body.loans == 2

    on_loop(story)


def test_the_first_turn_after_an_optimizer_step_begins_the_next_step_of_its_job() -> None:
    def story() -> None:
        stage = Stage(workers=1)
        stage.rolls_out(ONE)
        stage.said()
        stage.stepped(ONE)
        stage.stepped(TWO)
        assert stage.said() == []
        stage.rolls_out(ONE)
        assert stage.said() == [(CHAT[0], lending.BeginStep())]
        stage.rolls_out(ONE)
        assert stage.said() == []

    on_loop(story)


def test_a_worker_that_comes_later_is_lent_to_a_job_that_rolls_out_already() -> None:
    def story() -> None:
        stage = Stage(workers=0)
        stage.rolls_out(ONE)
        facts = messages.EngineFacts("chat", 8, 1000, 1000, 1, lends=True)
        for worker in CHAT:
            stage.body.add_worker(worker, facts)
            stage.body.record_heartbeat(worker, IDLE)
        assert stage.said() == [(worker, lent(ONE)) for worker in CHAT]

    on_loop(story)


@pytest.mark.parametrize("error", ["", "the model does not fit"])
def test_a_device_that_is_not_lent_any_more_is_not_shown_as_lent(error: str) -> None:
    def story() -> None:
        stage = Stage(workers=1)
        stage.rolls_out(ONE)
        stage.body.end_loan(CHAT[0], error)
        assert stage.body.borrowers == {}
        assert stage.body.refusals == ({CHAT[0]: error} if error else {})

    on_loop(story)


def test_a_service_that_breaks_its_promise_gets_its_device_back_and_status_says_why() -> None:
    def story() -> None:
        stage = Stage(workers=1)
        stage.rolls_out(ONE)
        stage.said()
        stage.body.record_heartbeat(CHAT[0], {**IDLE, "promise_kept": 0.0})
        ((worker, message),) = stage.said()
        assert (worker, type(message)) == (CHAT[0], lending.ReclaimNode)
        stage.body.end_loan(worker, "")
        assert "SLO" in stage.body.refusals[worker]
        assert stage.body.borrowers == {}

    on_loop(story)


def test_a_job_without_a_turn_for_a_while_borrows_no_more() -> None:
    def story() -> None:
        stage = Stage(workers=1)
        stage.rolls_out(ONE)
        stage.said()
        now_s = loop_time()
        report = ServingNodeReported(now_s + 2 * QUIET_S, NodeId(CHAT[0]), 0.1, 0.1)
        stage.runtime.feed(report)
        assert stage.said() == [], "its turn lives"
        stage.runtime.feed(TurnClosed(now_s + 2 * QUIET_S, ONE, "policy"))
        stage.runtime.feed(replace(report, now_s=now_s + 3 * QUIET_S))
        assert stage.said() == [], "it was active just now"
        stage.runtime.feed(replace(report, now_s=now_s + 4 * QUIET_S))
        ((_, message),) = stage.said()
        assert isinstance(message, lending.ReclaimNode)
        assert stage.body.refusals == {}, "nobody refused it anything"

    on_loop(story)
