"""A service whose trainers lend their processors: local engines work while there is nothing to
train.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.ports import free_port

from .service_process import ServiceProcess, wait_for
from .test_rollout_service import (
    completions,
    instances,
    replayed_record_gives_the_same_commands,
)
from .test_serve_faults import Run, train

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def lent(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    state = tmp_path_factory.mktemp("lent") / "state"
    options = ("--engines", "0", "--local-engines", "1", "--record", str(state / "record"))
    service = ServiceProcess(state, tiny_model, free_port(), *options)
    service.start()
    yield service
    assert service.stop() == 0
    replayed_record_gives_the_same_commands(state / "record.fleet.jsonl")


@pytest.fixture(scope="module")
def expected(service: ServiceProcess) -> Run:
    """The same run with an engine that has a processor of its own."""
    return train(service, lambda step: None)


def test_a_run_on_lent_processors_equals_one_on_an_engine_of_its_own(
    lent: ServiceProcess, expected: Run
) -> None:
    found = train(lent, lambda step: None)
    assert (found.tokens, found.losses) == (expected.tokens, expected.losses)
    wait_for("rest", lambda: [row["state"] for row in instances(lent).values()] == ["resting"])


def test_a_local_engine_that_is_killed_while_it_seeds_costs_nothing_but_time(
    lent: ServiceProcess, expected: Run
) -> None:
    killers = [threading.Timer(0.02, lent.kill_worker, ("local",)) for _ in range(2)]

    def kill(step: int) -> None:
        if step in (2, 5):
            killers[step // 5].start()

    found = train(lent, kill)
    for killer in killers:
        killer.join(120)
    assert (found.tokens, found.losses) == (expected.tokens, expected.losses)


def test_other_clients_turns_and_training_take_turns_with_the_processors(
    lent: ServiceProcess, service: ServiceProcess, expected: Run
) -> None:
    """The two kinds of work never hold them at once, which the service itself asserts, and both get
    done.
    """
    wanted = completions(service, 200)
    answers: list[list[list[int]]] = []
    crowd = threading.Thread(
        target=lambda: answers.extend(completions(lent, 200) for _ in range(3))
    )
    crowd.start()
    found = train(lent, lambda step: None)
    crowd.join(240)
    assert (found.tokens, found.losses) == (expected.tokens, expected.losses)
    assert answers == [wanted] * 3
