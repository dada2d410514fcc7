"""Tracks which member has and feeds which payload, for a relay whose receivers serve each other."""

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from slackwater.model.payload import Payload
from slackwater.policy.weights.source import PayloadHolder, SourcePolicy, TreeSource


class JoinedMember(NamedTuple):
    """A member that serves what it has at this address."""

    member: str
    host: str
    port: int
    node: str
    site: str


RELAY = JoinedMember("", "", 0, "", "")  # as a source: the relay itself


@dataclass(slots=True)
class _Flow:
    """One payload's distribution: who feeds whom, and who has all of it."""

    parents: dict[str, str] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)


class RelayTracker:
    """The members of a relay. The relay itself, named "", has every payload that it shows."""

    def __init__(self, node: str, site: str, policy: SourcePolicy | None = None) -> None:
        self._node, self._site = node, site
        self._policy = policy or TreeSource()
        self._members: dict[str, JoinedMember] = {}
        self._flows: dict[Payload, _Flow] = {}
        self._lock = threading.Lock()

    def leave(self, joined: JoinedMember) -> None:
        """A member left, unless it has joined again since."""
        with self._lock:
            if self._members.get(joined.member) == joined:
                self._leave(joined.member)

    def have(self, joined: JoinedMember, payload: Payload) -> None:
        """A member has all of a payload."""
        with self._lock:
            if joined.member in self._members:
                flow = self._flows.setdefault(payload, _Flow())
                flow.complete.add(joined.member)
                flow.parents.pop(joined.member, None)

    def source(self, joined: JoinedMember, payload: Payload, lost: str) -> JoinedMember | None:
        """Where a member, which joins by asking, fetches from; None: ask again soon. `lost` is not
        offered again.
        """
        with self._lock:
            if self._members.get(joined.member) != joined:
                self._leave(joined.member)
                self._members[joined.member] = joined
            flow = self._flows.setdefault(payload, _Flow())
            flow.parents.pop(joined.member, None)
            if lost:
                flow.complete.discard(lost)
                flow.parents.pop(lost, None)
            puller = PayloadHolder(joined.member, joined.node, joined.site, complete=False)
            found = self._policy.choose(puller, self._holders(flow, joined.member))
            if found is None:
                return None
            flow.parents[joined.member] = found.member
            return self._members[found.member] if found.member else RELAY

    def clear(self) -> None:
        """The relay has lost all that it had."""
        with self._lock:
            self._members.clear()
            self._flows.clear()

    def _holders(self, flow: _Flow, puller: str) -> list[PayloadHolder]:
        feeds: dict[str, int] = {}
        for parent in flow.parents.values():
            feeds[parent] = feeds.get(parent, 0) + 1
        found = [PayloadHolder("", self._node, self._site, feeds.get("", 0))]
        for member in {*flow.complete, *flow.parents}:
            joined = self._members[member]
            depth = self._depth(flow, member, puller)
            if depth is not None:
                complete = member in flow.complete
                found.append(
                    PayloadHolder(
                        member, joined.node, joined.site, feeds.get(member, 0), depth, complete
                    )
                )
        return found

    @staticmethod
    def _depth(flow: _Flow, member: str, puller: str) -> int | None:
        """A member's distance from a complete copy; None if it depends on the puller itself."""
        depth = 0
        while member != puller:
            if member in flow.complete or member == "":
                return depth
            member, depth = flow.parents.get(member, ""), depth + 1
        return None

    def _leave(self, member: str) -> None:
        self._members.pop(member, None)
        for flow in self._flows.values():
            flow.complete.discard(member)
            flow.parents.pop(member, None)
            for child in [c for c, parent in flow.parents.items() if parent == member]:
                del flow.parents[child]
