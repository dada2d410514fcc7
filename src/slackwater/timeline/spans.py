"""A run as time spans: what ran where, what was rented, and the cost; live or simulated."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase


@dataclass(frozen=True, slots=True)
class Span:
    """A span of one node's time, with figures in `about`; uncovered rented time is a bubble."""

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
    """One run to draw; `label` and `note` tell it from others in a comparison."""

    label: str
    title: str
    note: str
    end_s: float
    cost: float
    spans: tuple[Span, ...] = ()
    rentals: tuple[Rental, ...] = ()
    cost_steps: tuple[CostStep, ...] = ()
    about: Mapping[str, str | int] = field(default_factory=dict)
