"""Multi-turn agents."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One request of a session, and how long its environment takes afterwards."""

    prompt_tokens: int
    output_tokens: int
    pause_s: float


Session = tuple[AgentTurn, ...]
