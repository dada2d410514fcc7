"""Tracks which member has and feeds which payload, for a relay whose receivers serve each other."""

import threading
from dataclasses import dataclass, field

from slackwater.model.payload import Payload
from slackwater.policy.weights.source import PayloadHolder, SourcePolicy, TreeSource
from slackwater.weights.relay.protocol import JoinRelay, SourceChoice


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
        self._members: dict[str, JoinRelay] = {}
        self._flows: dict[Payload, _Flow] = {}
        self._lock = threading.Lock()

    def join(self, member: JoinRelay) -> None:
        """A member serves at an address; joining again replaces the old one."""
        with self._lock:
            self._leave(member.member)
            self._members[member.member] = member

    def leave(self, member: str, joined: JoinRelay) -> None:
        """A member left, unless it has joined again since."""
        with self._lock:
            if self._members.get(member) is joined:
                self._leave(member)

    def have(self, member: str, payloads: tuple[Payload, ...]) -> None:
        """A member has all of these payloads."""
        with self._lock:
            if member not in self._members:
                return
            for payload in payloads:
                flow = self._flows.setdefault(payload, _Flow())
                flow.complete.add(member)
                flow.parents.pop(member, None)

    def source(self, member: str, payload: Payload, lost: str) -> SourceChoice | None:
        """Where the member fetches from; None: ask again soon. `lost` is not offered again."""
        with self._lock:
            flow = self._flows.setdefault(payload, _Flow())
            flow.parents.pop(member, None)
            if lost:
                flow.complete.discard(lost)
                flow.parents.pop(lost, None)
            joined = self._members.get(member)
            if joined is None:
                return SourceChoice("", "", 0)
            puller = PayloadHolder(member, joined.node, joined.site, complete=False)
            found = self._policy.choose(puller, self._holders(flow, member))
            if found is None:
                return None
            flow.parents[member] = found.member
            if not found.member:
                return SourceChoice("", "", 0)
            there = self._members[found.member]
            return SourceChoice(there.member, there.host, there.port)

    def forget(self, payload: Payload) -> None:
        """Forget a payload."""
        with self._lock:
            self._flows.pop(payload, None)

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
