"""bench coexec: what it says of jobs that ran side by side, and of one that was held until the
others were done.
"""

from collections.abc import Sequence

from benchmarks.coscheduling import coexec
from benchmarks.coscheduling.coexec_shop import JobResult, Run, profile_of
from benchmarks.options import BenchOptions
from slackwater.model.errors import UnavailableError
from slackwater.timeline.permit_account import Stretch, account

_CYCLE_S, _STEPS = 4.0, 8


def _steps(job: str, began_s: float, cycle_s: float) -> list[Stretch]:
    permits = []
    for number in range(_STEPS):
        at_s, half_s = began_s + number * cycle_s, cycle_s / 2
        permits.append(Stretch(job, "rollout", at_s, at_s + half_s))
        permits.append(Stretch(job, "train", at_s + half_s, at_s + cycle_s))
    return permits


def _run(began_s: dict[str, float], cycle_s: float, held: dict[str, str] | None = None) -> Run:
    permits = [one for job, at_s in began_s.items() for one in _steps(job, at_s, cycle_s)]
    results = [
        JobResult(
            seed,
            {"ended_s": [one.end_s for one in permits if (one.job, one.phase) == (job, "train")]},
        )
        for seed, job in enumerate(began_s)
    ]
    return Run(results, account(permits, list(began_s), 3), {"plane": 0.02}, permits, held or {})


_ALONE = [_run({f"j{seed}": 100.0 * seed}, _CYCLE_S) for seed in (0, 1)]
for _seed, _one in enumerate(_ALONE):
    _one.results[0].seed = _seed


def test_two_jobs_that_take_turns_without_a_pause_make_twice_the_steps() -> None:
    two = _run({"a": 0.0, "b": _CYCLE_S / 2}, _CYCLE_S)
    figures = coexec._together("two", two, (_ALONE, _ALONE), 1.0)
    assert figures["two_jobs_throughput"] == 2.0
    assert figures["two_jobs_past_slo"] == 0
    assert figures["two_jobs_held"] == {}


def test_a_job_that_was_held_until_the_others_had_ended_is_named_with_its_reason() -> None:
    why = {"b": "no group can take it"}
    apart = _run({"a": 0.0, "b": _STEPS * _CYCLE_S + 1}, _CYCLE_S, why)
    assert not apart.together
    figures = coexec._together("two", apart, (_ALONE, _ALONE), 1.0)
    assert figures["two_jobs_held"] == why
    assert figures["two_jobs_throughput"] is None
    assert figures["two_jobs_predicted"]


def test_a_run_that_took_too_long_leaves_the_others_figures() -> None:
    """Its own are null, and the reason is said."""
    gave_up = UnavailableError("run alone-first took over 240 s")

    class HalfAShop:
        def run(self, name: str, seeds: Sequence[int], *rest: object) -> Run:
            if name == "alone-first" and seeds[0] == 1:
                raise gave_up
            return _ALONE[min(seeds[0], 1)]

    runs = coexec.Runs(HalfAShop(), 6, BenchOptions())  # type: ignore[arg-type]
    first, between = runs.each_alone("first", 0.0), runs.each_alone("between", 0.0)
    assert first[1] is None and None not in between
    assert runs.missing == {"alone-first-1": str(gave_up)}
    two = _run({"a": 0.0, "b": _CYCLE_S / 2}, _CYCLE_S)
    figures = coexec._together("two", two, (first, between), 1.0)
    assert figures["two_jobs_throughput"] == 2.0
    missing = coexec._together("two", None, (first, between), 1.0)
    assert missing["two_jobs_throughput"] is None and missing["two_jobs_predicted"]
    assert coexec._together("two", two, (first,), 1.0)["two_jobs_throughput"] is None
    assert coexec._permits([None], [])["permit_p99_ms"] is None


def test_a_profile_is_the_mean_of_what_was_seen_of_a_job_alone() -> None:
    slower = _run({"j": 0.0}, 2 * _CYCLE_S)
    profile = profile_of([_ALONE[0], slower])
    assert profile == {"rollout_s": 3.0, "train_s": 3.0, "sync_s": 0.0}
