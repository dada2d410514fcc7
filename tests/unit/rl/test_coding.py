"""The coding environment: its tests are real shell, and what takes time comes as a future."""

import subprocess
from concurrent.futures import Future
from typing import Any

import pytest

from slackwater.model.errors import ConfigError
from slackwater.rl.actions import ActionOutcome
from slackwater.rl.environments import playable
from slackwater.rl.environments.coding import OPERATIONS, Coding
from slackwater.rl.environments.episode import EnvironmentReply


def run_tests(script: str, program: str) -> ActionOutcome:
    """What the action service would answer, from a plain shell."""
    done = subprocess.run(
        ["sh", "-c", script],
        env={"PROGRAM": program},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return ActionOutcome(
        "a", "done", "", done.returncode, done.stdout, done.stderr, 0.0, 0.0, 1, {}
    )


class ShellClient:
    async def run(self, *command: str, variables: dict[str, str], **given: Any) -> ActionOutcome:
        return run_tests(command[2], variables["PROGRAM"])


class ShellThread:
    """Stands where the action thread does; the programs are run by a real shell."""

    def do(self, work: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        coroutine = work(ShellClient())
        try:
            coroutine.send(None)
        except StopIteration as ended:
            future.set_result(ended.value)
        return future


def reply(rules: Coding, prompt: int, *programs: str) -> EnvironmentReply:
    episode = rules.on(ShellThread()).episode(prompt)  # type: ignore[arg-type]
    for program in programs:
        heard = episode.answer(program).result()
    return heard


def solution(rules: Coding, prompt: int) -> str:
    name, variables = rules.task(prompt).question.rstrip("=").split()
    return f"{variables[0]}{OPERATIONS[name]}{variables[1]}"


@pytest.mark.parametrize("prompt", range(20))
def test_the_right_program_passes_all_tests_and_nonsense_none(prompt: int) -> None:
    rules = Coding(max_turns=1)
    assert reply(rules, prompt, solution(rules, prompt)) == EnvironmentReply("", 1.0, True)
    for nonsense in ("", "a+", "rm -rf x", "$(", "a;b", "99999"):
        assert reply(rules, prompt, nonsense).reward == 0.0


def test_a_failed_program_is_told_how_many_tests_passed_and_a_later_one_earns_less() -> None:
    rules = Coding(max_turns=2)
    first = reply(rules, 0, "9999")
    assert (first.done, first.observation) == (False, "0?")
    assert reply(rules, 0, "9999", solution(rules, 0)) == EnvironmentReply("", 0.75, True)
    assert reply(rules, 0, "9999", "9999") == EnvironmentReply("", 0.0, True)


def test_demonstrations_have_the_form_of_programs() -> None:
    rules = Coding(max_turns=2)
    for prompt in range(10):
        turns = rules.demonstration(prompt)
        assert turns[0][0] == rules.task(prompt).question
        assert all(len(program) == 3 for _, program in turns)


def test_without_sandboxes_it_says_so() -> None:
    with pytest.raises(ConfigError, match="needs a service with sandboxes"):
        playable(Coding(), None)
