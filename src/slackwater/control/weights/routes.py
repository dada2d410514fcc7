"""Routes of versions: the payloads, the nodes that relay them, and who takes them from whom.

A trainer stocks its node's relay; from there a payload goes from node to node, over a slow link
once, and to a node's engines out of its memory. `policy/weights/` decides on route, source and
retention.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from slackwater.control.weights import commands
from slackwater.control.weights.director_state import DirectorState
from slackwater.model.ids import NodeId
from slackwater.model.payload import Payload
from slackwater.policy.weights.pull_route import Delta, PullRoute, PullRoutePolicy
from slackwater.policy.weights.retention import StoredVersions, find_drops
from slackwater.policy.weights.source import PayloadHolder, SourcePolicy, TreeSource

_UNNAMED = 8  # stocked versions that nobody has published yet; the oldest goes first


@dataclass(slots=True)
class _Flow:
    """The distribution of one payload: nodes that have it, their sources, and failed sources."""

    bytes: int
    have: set[NodeId] = field(default_factory=set)
    parents: dict[NodeId, NodeId] = field(default_factory=dict)
    waiting: dict[NodeId, None] = field(default_factory=dict)
    failed: dict[NodeId, set[NodeId]] = field(default_factory=dict)

    def nodes(self) -> set[NodeId]:
        return {*self.have, *self.parents, *self.waiting}


class Routes:
    """See the module. Only the weight director calls it."""

    def __init__(self, state: DirectorState, source: SourcePolicy | None) -> None:
        self._state = state
        self._policy = PullRoutePolicy()
        self._source = source or TreeSource()
        self._sites: dict[NodeId, str] = {}
        self._flows: dict[Payload, _Flow] = {}
        self._unnamed: dict[str, None] = {}
        self.brought = self.crossed = 0

    # ---- relays ----
    def add_node(self, node: NodeId, site: str) -> None:
        """A node's relay joined, without payloads."""
        self.remove_node(node)
        self._sites[node] = site

    def remove_node(self, node: NodeId) -> None:
        """A node's relay is lost with its payloads; nodes that fetch from it get another source."""
        if self._sites.pop(node, None) is None:
            return
        for payload, flow in list(self._flows.items()):
            flow.have.discard(node)
            flow.parents.pop(node, None)
            flow.waiting.pop(node, None)
            flow.failed.pop(node, None)
            for child in [c for c, parent in flow.parents.items() if parent == node]:
                del flow.parents[child]
                flow.waiting[child] = None
            self._feed(payload)

    @property
    def lead_elsewhere(self) -> bool:
        """Whether there are other relays. On one node all read the store's file from page cache."""
        return len(self._sites) > 1

    # ---- payloads ----
    def record_stock(self, node: NodeId, version: str, sizes: Iterable[tuple[str, int]]) -> None:
        """A publisher put payloads of a version, by base, on its node's relay."""
        if node not in self._sites:
            return
        known = any(payload.version == version for payload in self._flows)
        for base, size in sizes:
            flow = self._flows.setdefault(Payload(version, base), _Flow(size))
            flow.have.add(node)
            flow.parents.pop(node, None)
            flow.waiting.pop(node, None)
            self._feed(Payload(version, base))
        if not known:
            self._unnamed[version] = None
        while len(self._unnamed) > _UNNAMED:
            self.forget(next(iter(self._unnamed)))

    def record_publish(self, version: str) -> None:
        """The version was published: its payloads stay as long as they are needed."""
        self._unnamed.pop(version, None)

    def forget(self, version: str) -> None:
        """Drop every payload of a deleted version."""
        self._unnamed.pop(version, None)
        for payload in [payload for payload in self._flows if payload.version == version]:
            self._drop(payload)

    def finish_fetch(self, node: NodeId, payload: Payload) -> None:
        """A node has all of a payload."""
        flow = self._flows.get(payload)
        if flow is None or node not in self._sites:
            return
        if node in flow.parents:
            del flow.parents[node]
            flow.have.add(node)
            flow.failed.pop(node, None)
        self._feed(payload)

    def fail_fetch(self, node: NodeId, payload: Payload, source: NodeId) -> None:
        """A node could not fetch a payload from a source, which is not tried again."""
        flow = self._flows.get(payload)
        if flow is None or flow.parents.get(node) != source:
            return  # it was sent elsewhere meanwhile
        del flow.parents[node]
        flow.waiting[node] = None
        flow.failed.setdefault(node, set()).add(source)
        self._feed(payload)

    # ---- routes ----
    def find(self, version: str, held: Collection[str], node: NodeId | None) -> PullRoute | None:
        """The route of fewest bytes to an instance with these copies; None: from the store."""
        if node is None or node not in self._sites:
            return None
        open_ = [
            (payload, flow)
            for payload, flow in self._flows.items()
            if node in flow.nodes() or flow.have - flow.failed.get(node, set())
        ]
        wholes = {payload.version: flow.bytes for payload, flow in open_ if not payload.base}
        deltas = [Delta(c.base, c.version, flow.bytes) for c, flow in open_ if c.base]
        return self._policy.choose(version, held, wholes, deltas)

    def under_way(self) -> list[tuple[Payload, NodeId, NodeId, int]]:
        """Running transfers: payload, source node, target node and bytes."""
        return [
            (payload, source, node, flow.bytes)
            for payload, flow in self._flows.items()
            for node, source in flow.parents.items()
        ]

    def crosses(self, source: NodeId, node: NodeId) -> bool:
        """Whether two nodes are at different sites, so that a slow link lies between them."""
        return self._sites.get(source) != self._sites.get(node)

    def whole_bytes(self, version: str) -> int | None:
        """The size of the version as a whole copy, where a relay has one."""
        flow = self._flows.get(Payload(version, ""))
        return None if flow is None else flow.bytes

    def bring(self, node: NodeId, route: PullRoute) -> None:
        """Fetch the payloads of a route that are neither on the node nor on their way there."""
        for payload in payloads_of(route):
            flow = self._flows[payload]
            if node not in flow.nodes():
                flow.waiting[node] = None
                self._feed(payload)

    def _feed(self, payload: Payload) -> None:
        """Give every waiting node a source; a node without a possible source stops waiting."""
        flow = self._flows[payload]
        for node in list(flow.waiting):
            if not flow.have - flow.failed.get(node, set()):
                del flow.waiting[node]
                flow.failed.pop(node, None)
                self._state.out.append(commands.DropPayload(node, payload.version, payload.base))
                continue
            puller = PayloadHolder(node, node, self._sites[node], complete=False)
            found = self._source.choose(puller, self._holders(flow, node))
            if found is None:
                continue
            source = NodeId(found.member)
            del flow.waiting[node]
            flow.parents[node] = source
            self.brought += 1
            self.crossed += found.crosses
            self._state.out.append(
                commands.FetchPayload(node, payload.version, payload.base, source)
            )

    def _holders(self, flow: _Flow, puller: NodeId) -> list[PayloadHolder]:
        """Possible sources: nodes that do not fetch it from the puller and have not failed it."""
        fed: dict[NodeId, int] = {}
        for parent in flow.parents.values():
            fed[parent] = fed.get(parent, 0) + 1
        found = []
        for node in sorted({*flow.have, *flow.parents} - flow.failed.get(puller, set())):
            depth, at = 0, node
            while at in flow.parents and at != puller:
                at, depth = flow.parents[at], depth + 1
            if at != puller:
                complete = node in flow.have
                found.append(
                    PayloadHolder(node, node, self._sites[node], fed.get(node, 0), depth, complete)
                )
        return found

    # ---- retention ----
    def tidy(
        self,
        order: Iterable[str],
        *,
        needed: Collection[str],
        held: Collection[str],
        pulling: Collection[str],
    ) -> None:
        """Drop unneeded payloads of a model's versions, given oldest first."""
        mine = [version for version in order if any(c.version == version for c in self._flows)]
        payloads = [payload for payload in self._flows if payload.version in mine]
        stored = StoredVersions(
            tuple(mine),
            {c.version: self._flows[c].bytes for c in payloads if not c.base},
            [Delta(c.base, c.version, self._flows[c].bytes) for c in payloads if c.base],
            pinned=needed,
            held=held,
            reading=pulling,
        )
        for payload in find_drops(stored, self._policy):
            if not self._flows[payload].parents and not self._flows[payload].waiting:
                self._drop(payload)

    def _drop(self, payload: Payload) -> None:
        flow = self._flows.pop(payload)
        nodes = sorted(flow.nodes())
        self._state.out.extend(
            commands.DropPayload(node, payload.version, payload.base) for node in nodes
        )

    def check_integrity(self) -> None:
        for payload, flow in self._flows.items():
            assert flow.nodes() <= self._sites.keys(), f"{payload} on a node that is gone"
            assert not flow.have & flow.parents.keys(), f"{payload} is brought where it is"
            assert not flow.waiting.keys() & {*flow.have, *flow.parents}
            for node in flow.parents:
                seen, at = {node}, flow.parents[node]
                while at in flow.parents:
                    assert at not in seen, f"{payload} goes in a circle over {node}"
                    seen.add(at)
                    at = flow.parents[at]


def payloads_of(route: PullRoute) -> tuple[Payload, ...]:
    """What a route fetches, in order."""
    start = (Payload(route.start),) if route.fetch_start else ()
    return start + tuple(Payload(delta.version, delta.base) for delta in route.deltas)
