"""Public sessions of agents (`session,turn,prompt_tokens,output_tokens,tool_s|gap_s`), or drawn
ones.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from slackwater.model.errors import ConfigError
from slackwater.sim.inputs.csv_rows import read_rows
from slackwater.sim.rollout.agent_trace import AgentTurn, Session


@dataclass(frozen=True, slots=True)
class _Row:
    session: str
    turn: int
    prompt_tokens: int
    output_tokens: int
    tool_s: float = 0.0
    gap_s: float = 0.0


def read_sessions(path: Path, *, max_context_tokens: int) -> tuple[Session, ...]:
    """Sessions in the file's order; each ends before the turn that would not fit the context."""
    by_session: dict[str, list[_Row]] = {}
    for row in read_rows(path, _Row, ignore_other_columns=True):
        by_session.setdefault(row.session, []).append(row)
    sessions: list[Session] = []
    for rows in by_session.values():
        turns: list[AgentTurn] = []
        for row in sorted(rows, key=lambda row: row.turn):
            if row.prompt_tokens + row.output_tokens >= max_context_tokens:
                break
            pause_s = min(row.tool_s or row.gap_s, 600.0)
            turns.append(AgentTurn(max(row.prompt_tokens, 1), max(row.output_tokens, 1), pause_s))
        if turns:
            sessions.append(tuple(turns))
    if not sessions:
        raise ConfigError.of("file", str(path), "must hold a session that fits the context")
    return tuple(sessions)


def drawn_sessions(count: int, seed: int, *, max_context_tokens: int) -> tuple[Session, ...]:
    """Sessions with the statistics of the public coding agents: 13 K first prompts that grow by
    700 a turn, answers with median 134 and a long tail, pauses mostly short.
    """
    rng = np.random.default_rng(seed)
    sessions: list[Session] = []
    for _ in range(count):
        prompt = int(rng.uniform(10_000, 17_000))
        turns: list[AgentTurn] = []
        for _ in range(1 + int(rng.geometric(1 / 50))):
            output = 1 + int(min(rng.lognormal(np.log(134), 1.1), 4000))
            if prompt + output >= max_context_tokens:
                break
            pause_s = float(rng.exponential(8.0)) if rng.random() < 0.4 else 0.05
            turns.append(AgentTurn(prompt, output, pause_s))
            prompt += output + int(rng.exponential(450))
        if turns:
            sessions.append(tuple(turns))
    return tuple(sessions)


def spread(sessions: Sequence[Session], count: int, seed: int) -> list[Session]:
    """`count` trajectories, each a session drawn at random."""
    rng = np.random.default_rng(seed)
    return [sessions[int(i)] for i in rng.integers(len(sessions), size=count)]


def scattered(sessions: Sequence[Session], seed: int, sigma: float = 0.5) -> list[Session]:
    """The same trajectories, but copies of a session differ: each ends early at random, and its
    pauses are longer or shorter by a random factor.
    """
    rng = np.random.default_rng(seed)
    drawn: list[Session] = []
    for session in sessions:
        kept, pauses = np.exp(rng.normal(0.0, sigma, 2))
        turns = session[: max(round(len(session) * min(float(kept), 1.0)), 1)]
        drawn.append(tuple(replace(turn, pause_s=turn.pause_s * float(pauses)) for turn in turns))
    return drawn


def unrelated(sessions: Sequence[Session]) -> list[Session]:
    """The same trajectories, some a little longer, so that no two have the same first prompt."""
    prompts: set[int] = set()
    drawn: list[Session] = []
    for session in sessions:
        first = session[0].prompt_tokens
        free = next(tokens for tokens in itertools.count(first) if tokens not in prompts)
        prompts.add(free)
        more = free - first
        drawn.append(
            tuple(replace(turn, prompt_tokens=turn.prompt_tokens + more) for turn in session)
        )
    return drawn
