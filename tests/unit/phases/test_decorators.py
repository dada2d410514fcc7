"""The decorators: permits asked for and given back, whatever the function is and however it
ends.
"""

import asyncio
import contextvars
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from permit_desk import PermitDesk

import slackwater
from harness.phase_job import leave_job
from slackwater.model.errors import ConfigError, RefusedError, UnavailableError


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[PermitDesk]:
    made = PermitDesk()
    monkeypatch.setenv("SLACKWATER_URL", made.url)
    monkeypatch.setenv("SLACKWATER_JOB", "mine")
    monkeypatch.delenv("SLACKWATER_OFFLINE", raising=False)
    yield made
    leave_job()
    made.close()


def asked(desk: PermitDesk) -> list[tuple[str, int]]:
    return [(b["phase"], b["iteration"]) for _, path, b in desk.seen if path.endswith("/permits")]


def test_a_function_runs_while_its_permit_is_held_and_gives_it_back(desk: PermitDesk) -> None:
    @slackwater.phase("rollout")
    def rollout(number: int) -> int:
        """Say what is held."""
        assert desk.held["rollout"][0] == "mine"
        return number + 1

    assert [rollout(1), rollout(number=2)] == [2, 3]
    assert rollout.__name__ == "rollout" and rollout.__doc__ == "Say what is held."
    assert desk.held == {}
    assert asked(desk) == [("rollout", 0), ("rollout", 1)]


def test_an_error_gives_the_permit_back_and_goes_on(desk: PermitDesk) -> None:
    @slackwater.phase("train")
    def train(error: BaseException) -> None:
        raise error

    for error in (ValueError("bad"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            train(error)
        assert desk.held == {}


def test_a_phase_inside_itself_asks_once_and_inside_another_is_refused(desk: PermitDesk) -> None:
    @slackwater.phase("train")
    def step(depth: int) -> int:
        return step(depth - 1) if depth else len(desk.held)

    @slackwater.phase("rollout")
    def rollout() -> None:
        step(0)

    assert step(3) == 1
    assert len(asked(desk)) == 1
    with pytest.raises(RefusedError, match="train: was entered inside phase rollout"):
        rollout()
    assert desk.held == {}


def test_a_generator_holds_its_permit_until_it_ends_or_is_closed(desk: PermitDesk) -> None:
    @slackwater.phase("rollout")
    def turns(count: int) -> Iterator[int]:
        yield from range(count)

    assert list(turns(3)) == [0, 1, 2]
    half = turns(3)
    assert next(half) == 0 and "rollout" in desk.held
    half.close()  # type: ignore[attr-defined]
    assert desk.held == {}


def test_coroutines_and_asynchronous_generators_let_the_loop_go_on(desk: PermitDesk) -> None:
    @slackwater.phase("train")
    async def train() -> int:
        await asyncio.sleep(0)
        return len(desk.held) + await inner()

    @slackwater.phase("train")
    async def inner() -> int:
        return 0

    @slackwater.phase("rollout")
    async def turns() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    async def both() -> list[int]:
        first = await asyncio.gather(train(), train())
        return [*first, *[number async for number in turns()]]

    assert asyncio.run(both()) == [1, 1, 0, 1, 2]
    assert desk.held == {} and len(asked(desk)) == 3


def test_a_cancelled_wait_gives_back_what_comes_later(desk: PermitDesk) -> None:
    with desk.lock:
        desk.held["train"] = ("other", 99)

    @slackwater.phase("train")
    async def train() -> None:
        raise AssertionError("never permitted")

    async def give_up() -> None:
        waiting = asyncio.create_task(train())
        await asyncio.to_thread(desk.wait_for_ask)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())
    with desk.lock:
        desk._free("other", 99)
        assert desk.lock.wait_for(lambda: any("DELETE" in s[0] for s in desk.seen), 30.0)
    assert desk.held == {}


def test_two_threads_of_a_process_take_turns(desk: PermitDesk) -> None:
    together: list[int] = []
    inside = 0

    @slackwater.phase("train")
    def train() -> None:
        nonlocal inside
        inside += 1
        together.append(inside)
        inside -= 1

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert together == [1, 1, 1, 1]


def test_a_thread_that_the_phase_waits_for_is_told_that_it_cannot_enter(desk: PermitDesk) -> None:
    @slackwater.phase("train")
    def step() -> str:
        return "ran"

    @slackwater.phase("train")
    def joins() -> list[Exception]:
        failed: list[Exception] = []

        def enter() -> None:
            try:
                step()
            except RefusedError as error:
                failed.append(error)

        thread = threading.Thread(target=enter, name="inner")
        thread.start()
        thread.join(60.0)
        assert not thread.is_alive(), "it waits for ever"
        return failed

    @slackwater.phase("train")
    def waits() -> str:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(step).result(60.0)

    @slackwater.phase("train")
    def takes_along() -> str:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(contextvars.copy_context().run, step).result(60.0)

    (error,) = joins()
    assert "entered by thread inner" in str(error) and "copy_context" in str(error)
    with pytest.raises(RefusedError, match="for which the train phase of thread MainThread waits"):
        waits()
    assert takes_along() == "ran"
    assert desk.held == {}


def test_a_program_that_is_told_to_end_gives_its_permit_back(desk: PermitDesk) -> None:
    """Without SLACKWATER_JOB it is nobody's driver, and says itself that its job is over."""
    code = """
import slackwater, sys, time
with slackwater.phase("train"):
    print("inside", flush=True)
    time.sleep(600)
"""
    environment = {k: v for k, v in os.environ.items() if k != "SLACKWATER_JOB"}
    program = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None and program.stdout.readline() == "inside\n"
    assert "train" in desk.held
    program.send_signal(signal.SIGTERM)
    assert program.wait(60) == 128 + signal.SIGTERM
    program.stdout.close()
    assert desk.held == {}
    # A sign of life of another thread may be read after it.
    ends = [body for method, path, body in desk.seen if (method, path.count("/")) == ("DELETE", 3)]
    assert ends == [{"outcome": "stopped", "reason": "its program was told to end (SIGTERM)"}]


def test_a_poll_without_a_permit_is_asked_again(desk: PermitDesk) -> None:
    desk.slow = 2
    with slackwater.phase("sync"):
        assert "sync" in desk.held
    assert len(asked(desk)) == 3 and set(asked(desk)) == {("sync", 0)}


def test_the_hook_reports_what_its_function_returns(desk: PermitDesk) -> None:
    @slackwater.runtime_hook
    def finished(count: int) -> tuple[int, int, int]:
        return count, 8, count * 10

    @slackwater.phase("rollout")
    def rollout() -> None:
        for count in (2, 6):
            assert finished(count) == (count, 8, count * 10)

    rollout()
    told = [body for _, path, body in desk.seen if path.endswith("progress")]
    assert told == [{"finished": n, "total": 8, "tokens": 10 * n} for n in (2, 6)]


def test_a_hook_that_returns_nonsense_is_named(desk: PermitDesk) -> None:
    @slackwater.runtime_hook
    def finished() -> str:
        return "many"

    with slackwater.phase("rollout"), pytest.raises(ConfigError, match="runtime_hook finished"):
        finished()


def test_a_refused_job_says_why(desk: PermitDesk) -> None:
    desk.refusal = "fits on no node"
    with pytest.raises(RefusedError, match="job mine: fits on no node"), slackwater.phase("train"):
        pass


def test_a_word_that_is_no_phase_is_refused_where_it_is_written() -> None:
    with pytest.raises(ConfigError, match="phase: 'training' must be one of rollout, train, sync"):
        slackwater.phase("training")


def test_without_a_service_the_error_names_the_variable_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SLACKWATER_URL", "SLACKWATER_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        ConfigError, match=r"SLACKWATER_URL.*slackwater up.*SLACKWATER_OFFLINE=1"
    ) as error:
        slackwater.phase("train").__enter__()
    assert "\n" not in str(error.value)
    monkeypatch.setenv("SLACKWATER_URL", "http://127.0.0.1:9")
    with pytest.raises(UnavailableError, match="does not answer"):
        slackwater.phase("train").__enter__()


def test_offline_is_a_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLACKWATER_OFFLINE", "1")
    monkeypatch.delenv("SLACKWATER_URL", raising=False)

    @slackwater.phase("train")
    def train() -> str:
        return "ran"

    assert train() == "ran"
    leave_job()


def test_state_sleeps_between_phases_and_wakes_with_the_same_bits(desk: PermitDesk) -> None:
    net = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    alone = torch.nn.Linear(64, 64)
    alone.load_state_dict(net.state_dict())
    beside = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    data = torch.randn(8, 64)

    def step(module: torch.nn.Module, adam: torch.optim.Optimizer) -> float:
        adam.zero_grad()
        loss: torch.Tensor = module(data).square().mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
        return loss.item()

    @slackwater.phase("train", state=lambda: [net, optimizer])
    def train() -> float:
        return step(net, optimizer)

    for _ in range(4):
        assert train() == step(alone, beside)
        assert net.weight.numel() == 0  # asleep: its memory is another's
    with slackwater.phase("train", state=[net, optimizer]):
        assert net.weight.numel() == 64 * 64


def test_cores_hold_for_the_thread_that_runs_the_body(desk: PermitDesk) -> None:
    allowed = os.sched_getaffinity(0)
    one = {min(allowed)}
    seen: list[set[int]] = []

    @slackwater.phase("train", cores=one)
    def plain() -> None:
        seen.append(os.sched_getaffinity(0))

    @slackwater.phase("train", cores=one)
    async def coroutine() -> None:
        await asyncio.sleep(0)
        seen.append(os.sched_getaffinity(0))

    @slackwater.phase("rollout", cores=one)
    async def turns() -> AsyncIterator[set[int]]:
        yield os.sched_getaffinity(0)

    async def both() -> list[set[int]]:
        await coroutine()
        return [found async for found in turns()]

    plain()
    seen += asyncio.run(both())
    assert seen == [one, one, one]
    assert os.sched_getaffinity(0) == allowed


def test_importing_the_package_loads_neither_tensors_nor_clients() -> None:
    code = (
        "import slackwater, sys; slackwater.phase('train'); print(sorted({'torch', 'numpy', "
        "'httpx', 'msgspec'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"
