"""A run as time spans: what ran where, what was rented, and the cost; live or simulated."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase, node_of

_MOST_SPANS = 200_000


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
    """The fleet's cost from `at_s` on."""

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


@dataclass(slots=True)
class _OpenPermit:
    job: JobId
    phase: Phase
    nodes: tuple[NodeId, ...]
    since_s: float
    about: Mapping[str, float]
    tail: bool = False


class PermitSpans:
    """Collects permits as they begin, shrink and end; `nodes` exist from `start_s`, and
    `share` says how much of its node a place is.
    """

    def __init__(
        self,
        nodes: tuple[NodeId, ...],
        start_s: float,
        share: Callable[[NodeId], float] = lambda place: 1.0,
    ) -> None:
        self._share = share
        self._nodes = nodes
        self._start_s = start_s
        self._open: dict[int, _OpenPermit] = {}
        self._busy_s: dict[NodeId, float] = dict.fromkeys(nodes, 0.0)
        self.spans: list[Span] = []

    def begin(
        self,
        permit: int,
        job: JobId,
        phase: Phase,
        nodes: tuple[NodeId, ...],
        now_s: float,
        about: Mapping[str, float] | None = None,
    ) -> None:
        """A phase begins; `about` are figures to show beside it."""
        self._open[permit] = _OpenPermit(job, phase, nodes, now_s, about or {})

    def shrink(self, permit: int, now_s: float) -> None:
        """A rollout shrinks to its tail."""
        permit_span = self._open.get(permit)
        if permit_span is not None:
            self._close(permit_span, now_s)
            permit_span.since_s, permit_span.tail = now_s, True

    def end(self, permit: int, now_s: float) -> None:
        ended = self._open.pop(permit, None)
        if ended is not None:
            self._close(ended, now_s)

    def _close(self, ended: _OpenPermit, now_s: float) -> None:
        for node in ended.nodes:
            if not ended.tail and node_of(node) in self._busy_s:
                self._busy_s[node_of(node)] += (now_s - ended.since_s) * self._share(node)
            if len(self.spans) < _MOST_SPANS:
                kind: Literal["run", "tail"] = "tail" if ended.tail else "run"
                start_s, end_s = ended.since_s - self._start_s, now_s - self._start_s
                span = Span(node, ended.job, ended.phase, start_s, end_s, kind, ended.about)
                self.spans.append(span)

    def utilisation(self, node: NodeId, now_s: float) -> float:
        """The share of the node's time in which a phase held it."""
        running_s = sum(
            (now_s - running.since_s) * self._share(place)
            for running in self._open.values()
            for place in running.nodes
            if node_of(place) == node and not running.tail
        )
        lived_s = max(now_s - self._start_s, 1e-9)
        return min((self._busy_s.get(node, 0.0) + running_s) / lived_s, 1.0)

    def timeline(self, label: str, title: str, now_s: float) -> Timeline:
        """The run so far, to be drawn."""
        end_s = now_s - self._start_s
        rentals = tuple(Rental(node, 0.0, end_s) for node in self._nodes)
        about = {"nodes": len(self._nodes), "permits": len(self.spans)}
        return Timeline(label, title, "", end_s, 0.0, tuple(self.spans), rentals, (), about)
