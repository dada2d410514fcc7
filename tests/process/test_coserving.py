"""A service whose worker lends, live: real processes, bursts, pressure and kills."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.options import BenchOptions
from benchmarks.serving.bursts import Bursts, alone_and_together
from harness.live_fleet import BASE, BASE_VERSION, JOB
from harness.multi_turn import MultiTurn
from harness.serving_floor import CHAT, CHAT_VERSION, ServingFloor, ServingPlan
from slackwater.model.ids import InstanceId, JobId, TrajectoryId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec
from slackwater.zoo.tiny import make_model

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model("tiny", folder / "chat", seed=0)
    make_model("small", folder / "policy", seed=1)
    return folder


@pytest.mark.timeout(900)
def test_answers_and_rollouts_are_the_same_to_the_bit_with_and_without_lending(
    models: Path, tmp_path: Path
) -> None:
    """A busy machine may leave no slack to lend, which shows nothing: then other bursts are
    tried.
    """
    for seed in (3, 4, 5):
        plan = ServingPlan(models / "chat", models / "policy", tmp_path / str(seed))
        plan.work.mkdir()
        games = MultiTurn(seed, trajectories=24, turns=4, max_tokens=120)
        bursts = Bursts(seed, 8, most=10)
        figures = asyncio.run(alone_and_together(plan, bursts, games, 4, BenchOptions()))
        assert figures["kills"] == 2
        assert figures["different_answers"] == 0
        assert figures["different_answer_logprobs"] == 0
        assert figures["different_rollouts"] == 0
        assert figures["different_rollout_logprobs"] == 0
        assert figures["leaked"] == 0
        if figures["lent_tokens"] > 0:
            return
    pytest.skip("the service left no slack in three tries: this machine is too busy to lend")


@pytest.mark.timeout(900)
def test_a_promise_that_cannot_be_kept_even_alone_is_said_and_the_service_serves_without_lending(
    models: Path, tmp_path: Path
) -> None:
    plan = ServingPlan(models / "chat", models / "policy", tmp_path, slo="ttft=5,tpot=0.0000001")
    asyncio.run(_serves_without_lending(plan, "tpot"))


@pytest.mark.timeout(900)
def test_a_rollout_model_that_does_not_fit_is_refused_by_name_and_the_service_goes_on(
    models: Path, tmp_path: Path
) -> None:
    plan = ServingPlan(models / "chat", models / "policy", tmp_path, kv_mb=1, page_kb=1024)
    asyncio.run(_refused(plan))


async def _serves_without_lending(plan: ServingPlan, said: str) -> None:
    async with asyncio.timeout(240), ServingFloor(plan) as floor:
        chat = await floor.start(plan.chat_worker())
        await floor.until_joined(chat)
        await floor.until(lambda: chat in floor.lending.refusals)
        assert f"slo: {said}" in floor.lending.refusals[chat]
        answers = await Bursts(1, 2, most=3).run(floor)
        assert len(answers) > 0
        assert floor.floor.controller.lending is not None
        assert floor.floor.controller.lending.lender.gauges()["serving_nodes"] == 0


async def _refused(plan: ServingPlan) -> None:
    async with asyncio.timeout(240), ServingFloor(plan) as floor:
        chat = await floor.start(plan.chat_worker())
        await floor.until_joined(chat)
        games = MultiTurn(1, trajectories=1, turns=1, max_tokens=8)
        rolling = asyncio.create_task(games.run(floor.floor.generate))
        await floor.until(lambda: chat in floor.lending.refusals)
        assert "memory" in floor.lending.refusals[chat]
        assert len(await Bursts(1, 2, most=3).run(floor)) > 0
        policy = await floor.start(plan.policy_worker())
        await floor.until_joined(policy)
        assert len(await rolling) == 1, "the turn went on where there was room"


@pytest.mark.timeout(900)
def test_a_cut_budget_stays_cut_until_the_borrowers_next_step_and_is_set_anew_by_it(
    models: Path, tmp_path: Path
) -> None:
    plan = ServingPlan(models / "chat", models / "policy", tmp_path, slo="ttft=60,tpot=20")
    asyncio.run(_budgets(plan))


async def _budgets(plan: ServingPlan) -> None:
    async with asyncio.timeout(240), ServingFloor(plan, live=frozenset([JOB])) as floor:
        chat = await floor.start(plan.chat_worker())
        await floor.until_joined(chat)
        await floor.floor.generate(_turn("first step"))
        (loan,) = floor.borrowed()

        def lent() -> int:
            records = floor.floor.manager.state.instances
            return next(
                one.load.kv_tokens for one in records if one.spec.instance == InstanceId(loan)
            )

        whole = lent()
        users = [floor.floor.generate(_question(number)) for number in range(8)]
        await asyncio.gather(*users)  # together they take a third of the memory
        await floor.until(lambda: lent() < whole)
        cut = lent()
        await floor.floor.generate(_turn("the same step"))
        floor.step(JOB)
        for _ in range(2):
            await floor.until_said(chat)
        assert lent() == cut, "no turn of the next step has come yet"
        await floor.floor.generate(_turn("second step"))
        await floor.until(lambda: lent() > cut)
        assert lent() < whole, "the service used more since the step before than it does now"
        floor.step(JOB)
        await floor.floor.generate(_turn("third step"))
        await floor.until(lambda: lent() == whole)
        assert floor.borrowed() == [loan], "the device was lent all the while"


def _turn(name: str) -> TurnSpec:
    sampling = Sampling(max_tokens=8, seed=1)
    return _asked(name, JOB, BASE, BASE_VERSION, (20, 30, 40), sampling)


def _question(number: int) -> TurnSpec:
    prompt = tuple((number * 31 + place * 7) % 240 + 10 for place in range(110))
    sampling = Sampling(max_tokens=60, seed=number, ignore_eos=True)
    return _asked(f"question {number}", JobId(CHAT), CHAT, CHAT_VERSION, prompt, sampling)


def _asked(
    name: str, job: JobId, base: str, version: str, prompt: tuple[int, ...], sampling: Sampling
) -> TurnSpec:
    return TurnSpec(
        turn=TurnId(name),
        trajectory=TrajectoryId(name),
        job=job,
        prompt=prompt,
        sampling=sampling,
        version=version,
        base_model=base,
    )
