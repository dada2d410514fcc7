"""By what way and from whom versions travel: the weight director's book of cargoes and of the nodes that relay them.

Every node's agent has a relay. A trainer stocks the one of its node; from there a cargo goes from node to node, over a slow link
once, and to the engines of a node out of that node's memory. `policy/weights/` decides: the way by bytes, the source by place,
and what may go by need.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from slackwater.control.weights import commands as do
from slackwater.model.cargo import Cargo
from slackwater.model.ids import NodeId
from slackwater.policy.weights.retention import RetentionByNeed, Shelf
from slackwater.policy.weights.source import Holder, SourcePolicy, TreeSource
from slackwater.policy.weights.way import Delta, Way, WayPolicy

_UNNAMED = 8  # stocked versions that nobody has published yet; the oldest goes first


@dataclass(slots=True)
class _Flow:
    """One cargo's way through the nodes: who has all of it, who is fed by whom, who waits, and who failed whom."""

    bytes: int
    have: set[NodeId] = field(default_factory=set)
    parents: dict[NodeId, NodeId] = field(default_factory=dict)
    waiting: dict[NodeId, None] = field(default_factory=dict)
    failed: dict[NodeId, set[NodeId]] = field(default_factory=dict)

    def nodes(self) -> set[NodeId]:
        return {*self.have, *self.parents, *self.waiting}


class Routes:
    """See the module. Only the weight director touches it; `out` takes the commands."""

    def __init__(
        self,
        way: WayPolicy | None = None,
        source: SourcePolicy | None = None,
        retention: RetentionByNeed | None = None,
    ) -> None:
        self._way = way or WayPolicy()
        self._source = source or TreeSource()
        self._retention = retention or RetentionByNeed(way=self._way)
        self._sites: dict[NodeId, str] = {}
        self._flows: dict[Cargo, _Flow] = {}
        self._unnamed: dict[str, None] = {}
        self.brought = self.crossed = 0

    # ---- relays ----
    def joined(self, node: NodeId, site: str, out: list[do.WeightCommand]) -> None:
        """A node's relay is here, and empty."""
        self.left(node, out)
        self._sites[node] = site

    def left(self, node: NodeId, out: list[do.WeightCommand]) -> None:
        """A node's relay is gone, with what it held; who took from it is sent elsewhere."""
        if self._sites.pop(node, None) is None:
            return
        for cargo, flow in list(self._flows.items()):
            flow.have.discard(node)
            flow.parents.pop(node, None)
            flow.waiting.pop(node, None)
            flow.failed.pop(node, None)
            for child in [c for c, parent in flow.parents.items() if parent == node]:
                del flow.parents[child]
                flow.waiting[child] = None
            self._feed(cargo, out)

    def has(self, node: NodeId) -> bool:
        """Whether the node has a relay."""
        return node in self._sites

    @property
    def lead_elsewhere(self) -> bool:
        """Whether a relay has others to give to. On one node everybody reads the store's file out of the page cache."""
        return len(self._sites) > 1

    # ---- cargoes ----
    def stocked(
        self,
        node: NodeId,
        version: str,
        sizes: Iterable[tuple[str, int]],
        out: list[do.WeightCommand],
    ) -> None:
        """A publisher put cargoes of a version, by base, on its node's relay."""
        if node not in self._sites:
            return
        known = any(cargo.version == version for cargo in self._flows)
        for base, size in sizes:
            flow = self._flows.setdefault(Cargo(version, base), _Flow(size))
            flow.have.add(node)
            flow.parents.pop(node, None)
            flow.waiting.pop(node, None)
            self._feed(Cargo(version, base), out)
        if not known:
            self._unnamed[version] = None
        while len(self._unnamed) > _UNNAMED:
            self.forget(next(iter(self._unnamed)), out)

    def named(self, version: str) -> None:
        """The version was published: from now on what keeps its cargoes is need."""
        self._unnamed.pop(version, None)

    def forget(self, version: str, out: list[do.WeightCommand]) -> None:
        """The version is deleted: so is every cargo of it."""
        self._unnamed.pop(version, None)
        for cargo in [cargo for cargo in self._flows if cargo.version == version]:
            self._drop(cargo, out)

    def arrived(self, node: NodeId, cargo: Cargo, out: list[do.WeightCommand]) -> None:
        """A node has all of a cargo."""
        flow = self._flows.get(cargo)
        if flow is None or node not in self._sites:
            return
        if node in flow.parents:
            del flow.parents[node]
            flow.have.add(node)
            flow.failed.pop(node, None)
        self._feed(cargo, out)

    def broke(
        self, node: NodeId, cargo: Cargo, source: NodeId, out: list[do.WeightCommand]
    ) -> None:
        """A node could not get a cargo from another: it is not sent there again for it."""
        flow = self._flows.get(cargo)
        if flow is None or flow.parents.get(node) != source:
            return  # it was sent elsewhere meanwhile
        del flow.parents[node]
        flow.waiting[node] = None
        flow.failed.setdefault(node, set()).add(source)
        self._feed(cargo, out)

    # ---- ways ----
    def way(self, version: str, held: Collection[str], node: NodeId | None) -> Way | None:
        """The way of fewest bytes for an instance on the node that holds these in host memory; None: from the store."""
        if node is None or node not in self._sites:
            return None
        open_ = [
            (cargo, flow) for cargo, flow in self._flows.items() if self._reachable(flow, node)
        ]
        wholes = {cargo.version: flow.bytes for cargo, flow in open_ if not cargo.base}
        deltas = [Delta(c.base, c.version, flow.bytes) for c, flow in open_ if c.base]
        return self._way.choose(version, held, wholes, deltas)

    @staticmethod
    def _reachable(flow: _Flow, node: NodeId) -> bool:
        lost = flow.failed.get(node, set())
        return node in flow.nodes() or bool(flow.have - lost)

    def bring(self, node: NodeId, way: Way, out: list[do.WeightCommand]) -> None:
        """Have the cargoes of a way come to the node, those that are not there or on their way."""
        for cargo in cargoes_of(way):
            flow = self._flows[cargo]
            if node not in flow.nodes():
                flow.waiting[node] = None
                self._feed(cargo, out)

    def _feed(self, cargo: Cargo, out: list[do.WeightCommand]) -> None:
        """Give every waiting node a source; one that nobody can feed any more is told to give it up."""
        flow = self._flows[cargo]
        for node in list(flow.waiting):
            if not flow.have - flow.failed.get(node, set()):
                del flow.waiting[node]
                flow.failed.pop(node, None)
                out.append(do.DropCargo(node, cargo.version, cargo.base))
                continue
            puller = Holder(node, node, self._sites[node], complete=False)
            found = self._source.choose(puller, self._holders(flow, node))
            if found is None:
                continue
            source = NodeId(found.member)
            del flow.waiting[node]
            flow.parents[node] = source
            self.brought += 1
            self.crossed += found.crosses
            out.append(do.BringCargo(node, cargo.version, cargo.base, source))

    def _holders(self, flow: _Flow, puller: NodeId) -> list[Holder]:
        """Who could feed the puller: not who takes it from the puller, and not who failed it."""
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
                    Holder(node, node, self._sites[node], fed.get(node, 0), depth, complete)
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
        out: list[do.WeightCommand],
    ) -> None:
        """Drop what nobody needs of a model's versions (oldest first): `held` lie on instances, `pulling` are on their way."""
        mine = [version for version in order if any(c.version == version for c in self._flows)]
        cargoes = [cargo for cargo in self._flows if cargo.version in mine]
        shelf = Shelf(
            tuple(mine),
            {c.version: self._flows[c].bytes for c in cargoes if not c.base},
            [Delta(c.base, c.version, self._flows[c].bytes) for c in cargoes if c.base],
            pinned=needed,
            held=held,
            reading=pulling,
        )
        drops = self._retention.decide(shelf)
        gone = [Cargo(v) for v in drops.wholes] + [Cargo(d.version, d.base) for d in drops.deltas]
        for cargo in gone:
            if not self._flows[cargo].parents and not self._flows[cargo].waiting:
                self._drop(cargo, out)

    def _drop(self, cargo: Cargo, out: list[do.WeightCommand]) -> None:
        flow = self._flows.pop(cargo)
        nodes = sorted(flow.nodes())
        out.extend(do.DropCargo(node, cargo.version, cargo.base) for node in nodes)

    # ---- questions ----
    def cargoes(self) -> dict[Cargo, set[NodeId]]:
        """Which cargoes there are, and the nodes that have all of each."""
        return {cargo: set(flow.have) for cargo, flow in self._flows.items()}

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        for cargo, flow in self._flows.items():
            assert flow.nodes() <= self._sites.keys(), f"{cargo} on a node that is gone"
            assert not flow.have & flow.parents.keys(), f"{cargo} is brought where it is"
            assert not flow.waiting.keys() & {*flow.have, *flow.parents}
            for node in flow.parents:
                seen, at = {node}, flow.parents[node]
                while at in flow.parents:
                    assert at not in seen, f"{cargo} goes in a circle over {node}"
                    seen.add(at)
                    at = flow.parents[at]


def cargoes_of(way: Way) -> tuple[Cargo, ...]:
    """What a way fetches, in order."""
    start = (Cargo(way.start),) if way.fetch_start else ()
    return start + tuple(Cargo(delta.version, delta.base) for delta in way.deltas)
