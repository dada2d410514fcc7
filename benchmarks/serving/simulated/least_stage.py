"""How long a rollout stage beside a service lasts at least, whatever the rules."""

from collections.abc import Iterator, Sequence

from benchmarks.rollout.simulated.agent_run import AgentFleet
from slackwater.sim.rollout.agent_trace import Session
from slackwater.sim.rollout.engine_cost import EngineCost


def least_stage_s(sessions: Sequence[Session], fleet: AgentFleet, lent_engines: float) -> float:
    """The longer of two bounds: the longest trajectory on an engine of its own, and all the work in
    full batches on the fleet and so many more engines. Each token is prefilled once.
    """
    engine, batch = fleet.engine, fleet.max_running
    longest_s = max(
        sum(_turns_s(one, engine, engine.step_s(1))) + sum(turn.pause_s for turn in one[:-1])
        for one in sessions
    )
    row_s = engine.step_s(batch) / batch
    work_s = sum(sum(_turns_s(one, engine, row_s)) for one in sessions)
    return max(longest_s, work_s / (fleet.engines + lent_engines))


def _turns_s(session: Session, engine: EngineCost, row_s: float) -> Iterator[float]:
    """What each turn takes of an engine, if its part of a step without contexts is `row_s`."""
    known = 0
    for turn in session:
        context = turn.prompt_tokens + turn.output_tokens / 2
        prompt_s = engine.prefill_s(turn.prompt_tokens - known, turn.prompt_tokens)
        decode_s = turn.output_tokens * (row_s + context * engine.context_s)
        yield prompt_s - engine.step_overhead_s + decode_s
        known = turn.prompt_tokens + turn.output_tokens
