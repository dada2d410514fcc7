"""When a job wants to borrow serving nodes, and for how long.

A job borrows from its first live turn on until it trains, or has had no turn for a while. Turns
that come after its optimizer has stepped belong to its next RL step.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from slackwater.control.jobs.events import JobTrained
from slackwater.control.lending import events as lending_events
from slackwater.control.rollout.facts import TurnClosed, TurnOpened
from slackwater.control.steps.events import DevicesGranted
from slackwater.model.ids import JobId, NodeId

LoanEvent: TypeAlias = (
    lending_events.LendingEvent | TurnOpened | TurnClosed | DevicesGranted | JobTrained
)

QUIET_S = 2.0  # after this long without a live turn a rollout counts as ended


@dataclass(slots=True)
class _Borrower:
    """A job that rolls out; `stepped`: its optimizer stepped after its last turn was submitted."""

    base_model: str
    active_s: float
    stepped: bool = False


class LoanDemand:
    """Translates events of jobs and serving nodes into the lender's events."""

    def __init__(self, lendable: Collection[str]) -> None:
        """`lendable` are the base models whose rollouts may borrow."""
        self._lendable = frozenset(lendable)
        self._nodes: set[NodeId] = set()
        self._borrowers: dict[JobId, _Borrower] = {}
        self._live: Counter[JobId] = Counter()

    def translate(self, event: LoanEvent) -> Iterator[lending_events.LendingEvent]:
        """The lender's events that follow from an event, in order."""
        match event:
            case TurnOpened():
                yield from self._turn_opened(event)
            case TurnClosed(_, job):
                self._live[job] -= 1
                if not self._live[job]:
                    del self._live[job]
            case DevicesGranted(now_s, _, job):
                # The job trains: unless it still rolls out, it needs no borrowed nodes.
                if job in self._borrowers and job not in self._live:
                    yield self._end(job, now_s)
            case JobTrained(_, job, ends_step=True) if job in self._borrowers:
                self._borrowers[job].stepped = True
            case JobTrained():
                pass
            case _:
                yield from self._translate_node_event(event)

    def _turn_opened(self, event: TurnOpened) -> Iterator[lending_events.LendingEvent]:
        job, base, now_s = event.job, event.base_model, event.now_s
        self._live[job] += 1
        if base not in self._lendable:
            return
        known = self._borrowers.get(job)
        self._borrowers[job] = _Borrower(base, now_s)
        if known is None:
            yield lending_events.CapacityWanted(now_s, job, max(len(self._nodes), 1), base)
        elif known.stepped:
            yield lending_events.BorrowerStepBegan(now_s, job)

    def _translate_node_event(
        self, event: lending_events.LendingEvent
    ) -> Iterator[lending_events.LendingEvent]:
        match event:
            case lending_events.ServingNodeReported(now_s, node):
                if node in self._nodes:
                    yield from self._end_quiet_jobs(now_s)
                yield event
            case lending_events.ServingNodeJoined(now_s, node, service):
                self._nodes.add(node)
                yield event
                yield lending_events.ServiceOpened(now_s, service, len(self._nodes))
                for job, borrower in self._borrowers.items():
                    count, base = len(self._nodes), borrower.base_model
                    yield lending_events.CapacityWanted(now_s, job, count, base)
            case lending_events.ServingNodeLost(_, node):
                self._nodes.discard(node)
                yield event
            case _:
                yield event

    def _end_quiet_jobs(self, now_s: float) -> Iterator[lending_events.LendingEvent]:
        """End the borrowing of jobs that have had no live turn for `QUIET_S`."""
        for job, borrower in list(self._borrowers.items()):
            if job in self._live:
                borrower.active_s = now_s
            elif now_s - borrower.active_s > QUIET_S:
                yield self._end(job, now_s)

    def _end(self, job: JobId, now_s: float) -> lending_events.CapacityReturned:
        del self._borrowers[job]
        return lending_events.CapacityReturned(now_s, job)

    def check_integrity(self) -> None:
        assert all(turns > 0 for turns in self._live.values()), f"turns ended twice: {self._live}"
