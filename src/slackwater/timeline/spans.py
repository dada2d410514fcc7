"""A run as stretches of time: what ran where, what was paid for, and what that cost. Live and
simulated runs make the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of one node's time. What no span covers while the node was rented is idle: a
    bubble. `about` are figures to show beside it.
    """

    node: NodeId
    job: JobId
    phase: Phase
    start_s: float
    end_s: float
    kind: Literal["run", "switch", "tail"]
    about: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rental:
    """One stretch in which a node was paid for."""

    node: NodeId
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class CostStep:
    """From `at_s` on, the fleet costs so much."""

    at_s: float
    price_per_h: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One run to be drawn. `label` tells it from others in a comparison, `note` stands beside its
    cost there.
    """

    label: str
    title: str
    note: str
    end_s: float
    cost: float
    spans: tuple[Span, ...] = ()
    rentals: tuple[Rental, ...] = ()
    cost_steps: tuple[CostStep, ...] = ()
    about: Mapping[str, str | int] = field(default_factory=dict)
