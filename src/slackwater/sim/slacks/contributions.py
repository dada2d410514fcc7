"""The contribution of each kind of slack: a scenario with combinations of kinds on and off.

A kind's contribution is its Shapley value: the mean saving of switching it on, over all orders in
which the five can be switched on. The first answer is the cost of switching off that kind only.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import factorial
from statistics import mean
from typing import Any

from slackwater.model.ids import JobId
from slackwater.sim.serving.cluster import ServingCluster
from slackwater.sim.slacks.fleet import FiveSlackFleet, Kinds, Slack, SlackRun, serve_alone
from slackwater.sim.slacks.scenario import SlackScenario

NONE, ALL = frozenset[Slack](), frozenset(Slack)
MEASURES = ("cost", "completed_s", "jobs_in_slo", "attainment")


@dataclass(frozen=True, slots=True)
class SlackOutcome:
    """One combination at one seed; `attainment` is the served model's, `jobs_in_slo` the share of
    jobs within their SLO, against a run on nodes of their own.
    """

    cost: float
    completed_s: float
    jobs_in_slo: float
    attainment: float
    kinds: int
    tokens: Mapping[str, int]


def all_combinations(kinds: Collection[Slack] = tuple(Slack)) -> list[Kinds]:
    """Every choice of kinds, from none to all."""
    return [
        frozenset(chosen)
        for count in range(len(kinds) + 1)
        for chosen in combinations(sorted(kinds), count)
    ]


def first_combinations() -> list[Kinds]:
    """None, all, and all but one."""
    return [NONE, ALL, *(ALL - {kind} for kind in Slack)]


def contributions(values: Mapping[Kinds, float]) -> dict[Slack, float]:
    """What each kind adds to a value: its Shapley value where every combination is known (their
    sum is the value of all less that of none), else what the value loses without that kind.
    """
    if len(values) < 2 ** len(Slack):
        return beside_others(values)
    found = dict.fromkeys(Slack, 0.0)
    for kind in found:
        for others in values:
            if kind not in others:
                size, rest = len(others), len(Slack) - len(others) - 1
                weight = factorial(size) * factorial(rest) / factorial(len(Slack))
                found[kind] += weight * (values[others | {kind}] - values[others])
    return found


def beside_others(values: Mapping[Kinds, float]) -> dict[Slack, float]:
    """What each kind adds to a value when the others are on."""
    return {kind: values[ALL] - values[ALL - {kind}] for kind in Slack}


class SlackStudy:
    """Runs combinations of a scenario in processes, and summarizes them."""

    def __init__(self, scenario: SlackScenario, seed: int = 0) -> None:
        self.scenario, self.seed = scenario, seed
        self._runs: dict[tuple[int, Kinds], SlackRun] = {}
        self._alone: dict[int, ServingCluster] = {}

    def run(
        self,
        seeds: Sequence[int],
        wanted: Sequence[Kinds],
        processes: int | None = None,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        """Run the combinations without a result."""
        cases = [(s, on) for s in seeds for on in wanted if (s, on) not in self._runs]
        cases.sort(key=lambda case: Slack.SERVING not in case[1])  # the longest first
        with ProcessPoolExecutor(processes or os.cpu_count()) as pool:
            results = pool.map(partial(_result, self.scenario), cases)
            for done, (case, result) in enumerate(zip(cases, results, strict=True), 1):
                self._runs[case] = result
                progress(done / len(cases))
        for seed in seeds:
            longest_s = max(run.completed_s for (s, _), run in self._runs.items() if s == seed)
            self._alone[seed] = serve_alone(self.scenario, seed, longest_s)

    def outcome(self, seed: int, on: Kinds) -> SlackOutcome:
        run, alone = self._runs[seed, on], self._runs[seed, NONE]
        slos = {JobId(job.name): job.slo for job in self.scenario.jobs}
        kept = [run.job_s[job] <= slos[job] * alone.job_s[job] * 1.001 for job in slos]
        served = run.attainment
        if served is None:
            served = self._alone[seed].attainment(run.completed_s)
        return SlackOutcome(
            cost=run.cost,
            completed_s=run.completed_s,
            jobs_in_slo=mean(kept),
            attainment=served,
            kinds=len(run.kinds),
            tokens=run.tokens,
        )

    def nodes_used(self) -> list[str]:
        """Nodes that were rented with all kinds on, at any seed."""
        used = {node for (_, on), run in self._runs.items() if on == ALL for node in run.nodes}
        return sorted(
            used, key=lambda node: (node.rpartition("-")[0], int(node.rpartition("-")[2]))
        )

    def figures(self) -> dict[str, Any]:
        """Results without slack, with all kinds, and each kind's contribution with its spread."""
        seeds = sorted({seed for seed, _ in self._runs})
        whole = {on for seed, on in self._runs if seed == seeds[0]}
        found: dict[str, Any] = {
            "seeds": len(seeds),
            "combinations": len(whole),
            "kinds_seen": min(self.outcome(seed, ALL).kinds for seed in seeds),
        }
        for name, on in (("none", NONE), ("all", ALL)):
            outcomes = [self.outcome(seed, on) for seed in seeds]
            found[name] = {
                key: mean(getattr(outcome, key) for outcome in outcomes) for key in MEASURES
            }
        tokens = [self.outcome(seed, ALL).tokens for seed in seeds]
        sources = sorted({source for each in tokens for source in each})
        found["rollout_tokens"] = {s: mean(each.get(s, 0) for each in tokens) for s in sources}
        found["kinds"] = {kind.value: {} for kind in Slack}
        for measure in MEASURES:
            seen = [
                {on: getattr(self.outcome(seed, on), measure) for on in whole} for seed in seeds
            ]
            by_seed = [contributions(values) for values in seen]
            for kind in Slack:
                values = [each[kind] for each in by_seed]
                found["kinds"][kind.value][measure] = {
                    "mean": mean(values),
                    "least": min(values),
                    "most": max(values),
                    "beside_others": mean(beside_others(each)[kind] for each in seen),
                }
        return found


def study_in_steps(
    study: SlackStudy, seeds: int, progress: Callable[[float], None] = lambda share: None
) -> Iterator[dict[str, Any]]:
    """The first answer, then one after every further seed with all combinations."""
    study.run([study.seed], first_combinations())
    yield study.figures()
    for count in range(1, seeds + 1):
        before = (count - 1) / seeds

        def report_step(share: float, before: float = before) -> None:
            progress(before + share / seeds)

        study.run([study.seed + count - 1], all_combinations(), progress=report_step)
        yield study.figures()


def _result(scenario: SlackScenario, case: tuple[int, Kinds]) -> SlackRun:
    seed, on = case
    return FiveSlackFleet(scenario, on, seed).finish()
