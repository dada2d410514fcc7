"""What an engine's work costs, learned from the record of a live run.

Between two token frames of a busy engine lies one step (or several, if it was prefilling). Its
length is fitted, by least squares over all steps, to the batch size (straight lines between knots),
the context read, and the prompt tokens that came in. The sum of the fitted steps is then the sum of
the measured ones. Engines of one machine slow each other down: the fit is over steps during which
others worked too, and how much faster one works alone is a figure.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.rollout.measured_cost import MeasuredCost
from slackwater.control.record import read_entry
from slackwater.model.errors import RefusedError

_KNOTS = (4, 16, 48)
_SIZES = (1, *_KNOTS, 64)
_FEWEST_STEPS = 50


@dataclass(frozen=True, slots=True)
class Step:
    """One step as seen from outside."""

    batch: int
    context_tokens: int
    prefilled_tokens: int
    took_s: float
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs while all engines work, and by what a lone engine's work must be multiplied."""

    cost: MeasuredCost
    alone_slowdown: float


@dataclass(slots=True)
class _Engine:
    """What the record says of one instance so far. `since_s` is None while it has nothing to do."""

    since_s: float | None = None
    contexts: dict[int, int] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)

    def sent(self, attempt: int, context_tokens: int, now_s: float) -> None:
        if not self.contexts:
            self.since_s = now_s
        self.contexts[attempt] = context_tokens
        self.fresh.add(attempt)

    def left(self, attempt: int) -> None:
        self.contexts.pop(attempt, None)
        self.fresh.discard(attempt)

    def made(self, attempts: list[int], now_s: float) -> Step | None:
        known = [attempt for attempt in attempts if attempt in self.contexts]
        if self.since_s is None or not known:
            return None
        prefilled = sum(self.contexts[attempt] for attempt in known if attempt in self.fresh)
        context = sum(self.contexts[attempt] for attempt in known)
        step = Step(len(known), context, prefilled, now_s - self.since_s)
        self.since_s = now_s
        self.fresh.difference_update(known)
        for attempt in known:
            self.contexts[attempt] += 1
        return step


def steps_of(lines: Iterable[bytes]) -> list[Step]:
    """Every step of every instance in a record of the rollout manager."""
    engines: dict[str, _Engine] = {}
    steps: list[Step] = []
    for line in lines:
        entry = read_entry(line)
        event: dict[str, Any] = entry["event"]["body"]
        match entry["event"]["type"]:
            case "TokensArrived":
                engine = engines.setdefault(event["instance"], _Engine())
                step = engine.made(event["attempts"], event["now_s"])
                if step is not None:
                    busy = sum(bool(other.contexts) for other in engines.values())
                    steps.append(replace(step, alone=busy == 1))
            case "TurnEnded" if event["instance"] in engines:
                engines[event["instance"]].left(event["attempt"])
            case "InstanceLost":
                engines.pop(event["instance"], None)
        for command in entry["commands"]:
            body = command["body"]
            if command["type"] == "DispatchTurn":
                engine = engines.setdefault(body["instance"], _Engine())
                context = len(body["prompt"]) + len(body["generated"])
                engine.sent(body["attempt"], context, event["now_s"])
            elif command["type"] == "AbortTurn" and body["instance"] in engines:
                engines[body["instance"]].left(body["attempt"])
    return steps


def fit(steps: list[Step], kv_tokens: int) -> Profile:
    """Costs under which the steps, added up, take as long as they took."""
    shared = [step for step in steps if not step.alone]
    if len(shared) < _FEWEST_STEPS:
        raise RefusedError(f"profile: {len(shared)} steps, at least {_FEWEST_STEPS} are needed")
    weights = _nonnegative_tail(_features(shared), np.array([step.took_s for step in shared]))
    sizes = [Step(size, 0, 0, 0.0) for size in _SIZES]
    step_s = np.maximum(_features(sizes) @ weights, 1e-6)
    pairs = tuple((size, float(value)) for size, value in zip(_SIZES, step_s, strict=True))
    cost = MeasuredCost(pairs, float(weights[-2]), float(weights[-1]), kv_tokens)
    alone = [step for step in steps if step.alone]
    if len(alone) < _FEWEST_STEPS:
        return Profile(cost, 1.0)
    expected_s = float(np.sum(_features(alone) @ weights))
    return Profile(cost, sum(step.took_s for step in alone) / expected_s)


def _features(steps: list[Step]) -> np.ndarray:
    batch = np.array([step.batch for step in steps], float)
    return np.column_stack(
        [
            np.ones(len(steps)),
            batch,
            *(np.maximum(batch - knot, 0.0) for knot in _KNOTS),
            [step.context_tokens for step in steps],
            [step.prefilled_tokens for step in steps],
        ]
    )


def _nonnegative_tail(features: np.ndarray, took: np.ndarray) -> np.ndarray:
    """Least squares in which context and prefill, the last two, cost nothing rather than less."""
    used = list(range(features.shape[1]))
    weights = np.zeros(features.shape[1])
    while True:
        found = np.linalg.lstsq(features[:, used], took, rcond=None)[0]
        weights[:] = 0.0
        weights[used] = found
        wrong = [
            column for column in used[-2:] if column >= len(weights) - 2 and weights[column] < 0
        ]
        if not wrong:
            return weights
        used.remove(min(wrong, key=lambda column: weights[column]))
