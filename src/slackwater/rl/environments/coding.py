"""Write a one-line program that passes its tests in a sandbox."""

import operator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

import numpy as np

from slackwater.rl.actions import ActionClient, ActionThread
from slackwater.rl.environments.episode import EnvironmentReply, check_at_least

OPERATIONS = {"add": "+", "sub": "-", "mul": "*"}
_FUNCTIONS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
VARIABLES = "abc"
_TESTS = """passed=0
test_case() {{ a=$1; b=$2; c=$3; [ "$(( $PROGRAM ))" = "$4" ] && passed=$((passed+1)); }}
{cases}
echo "$passed"
"""
_LIMITS = {"memory_mib": 64, "processes": 16, "disk_mib": 8, "output_bytes": 4096}


@dataclass(frozen=True, slots=True)
class Coding:
    """`sub ca=` asks for a program such as `c-a`; its tests determine the reward.

    A tool call runs the program; if tests fail, the model sees how many passed and may try again,
    up to `max_turns`. Passing all `cases` in turn t earns 1 - (t - 1) / (2 max_turns); otherwise
    the last program earns up to `partial`, by the share that passed. With `own_environment` each
    trajectory has one environment with the tests; otherwise every run is separate.
    """

    kind: Literal["coding"] = "coding"
    prompts: int = 2000
    cases: int = 4
    max_turns: int = 2
    partial: float = 0.4
    own_environment: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least("environment.prompts", self.prompts, 1)
        check_at_least("environment.cases", self.cases, 1)
        check_at_least("environment.max_turns", self.max_turns, 1)

    def task(self, prompt: int) -> "Task":
        """The task and its tests, for a shell."""
        random = np.random.default_rng([self.seed, prompt])
        name = str(random.choice(list(OPERATIONS)))
        first, second = (VARIABLES[index] for index in random.integers(0, len(VARIABLES), 2))
        lines = []
        for _ in range(self.cases):
            values = dict(zip(VARIABLES, random.integers(1, 10, 3).tolist(), strict=True))
            expected = _FUNCTIONS[name](values[first], values[second])
            lines.append(f"test_case {values['a']} {values['b']} {values['c']} {expected}")
        return Task(f"{name} {first}{second}=", _TESTS.format(cases="\n".join(lines)))

    def demonstration(self, prompt: int) -> tuple[tuple[str, str], ...]:
        """Programs of the right format for random operations."""
        random = np.random.default_rng([self.seed, prompt, 1])
        turns, observation = [], self.task(prompt).question
        for _ in range(self.max_turns):
            first, second = (VARIABLES[index] for index in random.integers(0, len(VARIABLES), 2))
            operation = str(random.choice(list(OPERATIONS.values())))
            turns.append((observation, f"{first}{operation}{second}"))
            observation = f"{int(random.integers(0, self.cases))}?"
        return tuple(turns)

    def on(self, actions: ActionThread) -> "CodingTasks":
        """The tasks, with the action service that runs programs."""
        return CodingTasks(self, actions)


@dataclass(frozen=True, slots=True)
class Task:
    """A question, and the script that tests an answer."""

    question: str
    tests: str


@dataclass(frozen=True, slots=True)
class CodingTasks:
    """An environment that runs programs through the action service."""

    rules: Coding
    actions: ActionThread

    @property
    def prompts(self) -> int:
        return self.rules.prompts

    def episode(self, prompt: int) -> "_Programming":
        return _Programming(self.rules, self.actions, self.rules.task(prompt))

    def demonstration(self, prompt: int) -> tuple[tuple[str, str], ...]:
        return self.rules.demonstration(prompt)


class _Programming:
    """One trajectory; its environment is opened with the first program and closed with the last."""

    def __init__(self, rules: Coding, actions: ActionThread, task: Task) -> None:
        self._rules = rules
        self._actions = actions
        self._task = task
        self._turn = 0
        self._environment: str | None = None
        self.first_observation = task.question

    def answer(self, text: str) -> "Future[EnvironmentReply]":
        self._turn += 1
        return self._actions.do(lambda client: self._test(client, text))

    async def _test(self, client: ActionClient, text: str) -> EnvironmentReply:
        command: tuple[str, ...] = ("sh", "-c", self._task.tests)
        if self._rules.own_environment:
            command = ("sh", "tests.sh")
            if self._environment is None:
                files = {"tests.sh": self._task.tests}
                self._environment = await client.open(files=files, memory_mib=_LIMITS["memory_mib"])
        outcome = await client.run(
            *command,
            environment=self._environment,
            kind="unit-tests",
            variables={"PROGRAM": text.strip().replace("\0", "")[:80]},
            limit_s=10.0,
            limits=_LIMITS,
        )
        output = outcome.stdout.strip()
        reply = self._score(int(output) if outcome.ok and output.isdigit() else 0)
        if reply.done and self._environment is not None:
            await client.close(self._environment)
        return reply

    def _score(self, passed: int) -> EnvironmentReply:
        rules = self._rules
        if passed == rules.cases:
            return EnvironmentReply("", 1 - (self._turn - 1) / (2 * rules.max_turns), True)
        if self._turn == rules.max_turns:
            return EnvironmentReply("", rules.partial * passed / rules.cases, True)
        return EnvironmentReply(f"{passed}?", 0.0, False)
