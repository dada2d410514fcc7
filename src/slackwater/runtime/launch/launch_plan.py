"""The launch plan: which worker may connect now, from which node, with what key and role, and which
files it may use.

The control plane makes a key for every worker that an agent starts, which is valid for that one
process. A worker may use only files that messages to it have named: the hub passes every message to
`authorize` before it sends it.
"""

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from slackwater.model.device import count_ranks
from slackwater.model.errors import ConfigError, RefusedError
from slackwater.model.ids import NodeId, WorkerId
from slackwater.model.uri import Uri, part_of, version_uri, whole_uri
from slackwater.runtime.launch import port
from slackwater.runtime.launch.node_keys import NodeKeys
from slackwater.runtime.launch.port import WorkerPlan
from slackwater.wire import lending, messages
from slackwater.wire.agent import AGENT_PREFIX, NodeFacts, agent_name
from slackwater.wire.certificate import fingerprint_of

_RECENT = 512  # URIs that a worker was told last; each is used at once, or told again
_ROLES = {
    **dict.fromkeys((port.ENGINE, port.ENGINE_SERVER, port.COSERVING), "engine"),
    port.TRAINER: "trainer",
    port.SANDBOX: "sandbox",
    port.REWARDS: "rewards",
}


@dataclass(slots=True)
class PlannedWorker:
    """One process of a worker. `reads` and `writes` are the URIs that it may use; a write has the
    upload that was committed for it.
    """

    worker: WorkerId
    node: NodeId
    plan: WorkerPlan
    key: str
    joined: bool = False
    lent: lending.LendNode | None = None
    cores: int = 0
    memory_mib: int = 0
    reads: dict[str, None] = field(default_factory=dict)
    writes: dict[str, str | None] = field(default_factory=dict)

    def option(self, name: str, otherwise: str | None = None) -> str | None:
        arguments = self.plan.arguments
        return arguments[arguments.index(name) + 1] if name in arguments else otherwise

    def may_read(self, uri: Uri) -> bool:
        """Whether it may read this, or the folder or version that this is a part of."""
        folder, _, _ = str(uri).rpartition("/")
        started_with = self.plan.arguments if uri.kind == "models" else ()
        names = (str(uri), folder, whole_uri(str(uri)))
        return any(name in self.reads or name in started_with for name in names)

    def allow(self, reads: Sequence[str] = (), writes: Sequence[str] = ()) -> None:
        """Allow these URIs; the oldest beyond `_RECENT` were used long ago, and are dropped."""
        allowed: dict[str, Any]
        for allowed, more in ((self.reads, reads), (self.writes, writes)):
            for name in more:
                allowed.pop(name, None)
                allowed[name] = None
            while len(allowed) > _RECENT:
                del allowed[next(iter(allowed))]

    def check_commit(self, uri: Uri, upload: str) -> None:
        """RefusedError if it has written this before; another try of the same upload may be."""
        if self.writes[str(uri)] not in (None, upload):
            raise RefusedError(f"{uri}: {self.worker} has written it already")

    def record_commit(self, uri: Uri, upload: str) -> None:
        """It has written this, which it may do once."""
        self.writes[str(uri)] = upload


class LaunchPlan:
    """What the hub and the depot ask about peers (`net/hub.py`)."""

    def __init__(self, keys: NodeKeys) -> None:
        self._keys = keys
        self._workers: dict[WorkerId, PlannedWorker] = {}
        self._nodes: dict[NodeId, NodeFacts] = {}

    # ---- for the fleet ----
    def node_joined(self, facts: NodeFacts) -> None:
        self._nodes[NodeId(facts.node)] = facts

    def node_lost(self, node: NodeId) -> None:
        self._nodes.pop(node, None)

    def expect(self, node: NodeId, plan: WorkerPlan, worker: WorkerId, key: str = "") -> str:
        """Expect a worker that is about to start, or to return with its key; returns the key."""
        made = PlannedWorker(worker, node, plan, key or secrets.token_urlsafe(32))
        self._workers[worker] = made
        return made.key

    def forget(self, worker: WorkerId) -> None:
        """Its process has ended, or was never there."""
        self._workers.pop(worker, None)

    def authorize(self, worker: WorkerId, message: messages.Message) -> None:
        """Allow a worker the files that a message to it names."""
        if type(message) is messages.Generate:  # the most frequent, which names none
            return
        known = self._workers.get(lending.lender_of(worker))
        if known is None:
            return
        match message:
            case messages.PullVersion(version):
                known.allow(reads=[str(version_uri(version))])
            case messages.CreateModel(source=source):
                known.allow(reads=[source])
            case messages.RestoreModel(saved=saved, source=source):
                known.allow(reads=[saved, source])
            case messages.LoadState(saved=saved):
                known.allow(reads=[saved])
            case messages.SaveState(saved=saved):
                known.allow(writes=[saved])
            case messages.PublishWeights(version=version):
                ranks = count_ranks(known.plan.layout or "")
                parts = [part_of(version, rank, ranks) for rank in range(ranks if ranks > 1 else 0)]
                known.allow(writes=[str(version_uri(each)) for each in (version, *parts)])
            case lending.LendNode(model=model):
                known.lent = message
                known.allow(reads=[model])

    def node_of(self, worker: WorkerId) -> NodeId | None:
        """Where a worker runs, or the lender of a loan."""
        known = self._workers.get(lending.lender_of(worker))
        return None if known is None else known.node

    # ---- for the depot ----
    def holder_of(self, key: str) -> PlannedWorker | None:
        wanted, found = key.encode(errors="replace"), None
        for known in self._workers.values():
            if hmac.compare_digest(known.key.encode(), wanted):
                found = known
        return found

    # ---- for the hub ----
    def key_of(self, request: messages.ConnectRequest) -> bytes | None:
        if request.worker.startswith(AGENT_PREFIX):
            return self._keys.key(request.worker.removeprefix(AGENT_PREFIX), request.pool).encode()
        known = self._workers.get(lending.lender_of(request.worker))
        return None if known is None else known.key.encode()

    def check(self, request: messages.ConnectRequest, hello: messages.Hello) -> None:
        if request.worker.startswith(AGENT_PREFIX):
            _check_agent(request, hello)
            return
        known = self._workers.get(lending.lender_of(hello.worker))
        if known is None:  # its process ended meanwhile
            raise RefusedError(f"worker {hello.worker}: is not expected now")
        role = _ROLES.get(known.plan.module)
        _require("role", hello.role, role)
        facts = {"engine": hello.engine, "sandbox": hello.sandbox, "rewards": hello.rewards}
        claimed = {name for name, value in facts.items() if value is not None}
        if claimed != ({role} & facts.keys()) or hello.node is not None:
            raise ConfigError.of("hello", sorted(claimed), f"must say what a {role} is")
        if known.worker != hello.worker:
            _check_loan(known, hello)
            return
        if known.joined:
            raise RefusedError(f"worker {hello.worker}: has connected before; its key holds once")
        if hello.engine is not None:
            _check_engine(known, hello.engine)
        elif hello.rewards is not None:
            _require("rewards: node", hello.rewards.node, known.option("--node"))
            options = pairwise(known.plan.arguments)
            staged = [value for option, value in options if option == "--stage"]
            named = [str(service.service) for service in hello.rewards.services]
            named += hello.rewards.failed
            _require("rewards: services", sorted(named), sorted(staged))
        elif hello.sandbox is not None:
            self._check_sandbox(known, hello)
        known.joined = True

    def _check_sandbox(self, known: PlannedWorker, hello: messages.Hello) -> None:
        """All sandboxes of a node together have no more than the node said that it has."""
        assert hello.sandbox is not None
        _require("sandbox: node", hello.sandbox.node, known.option("--node"))
        node = self._nodes.get(known.node)
        if node is None:
            raise RefusedError(f"worker {hello.worker}: its node {known.node} is not here")
        known.cores = sum(len(numa) for numa in hello.sandbox.cores)
        known.memory_mib = hello.sandbox.memory_mib
        mates = [mate for mate in self._workers.values() if mate.node == known.node]
        for field_, offered, most in (
            ("cores", sum(mate.cores for mate in mates), node.cores),
            ("memory_mib", sum(mate.memory_mib for mate in mates), node.memory_mb),
        ):
            if offered > most:
                known.cores = known.memory_mib = 0
                fix = f"is more than node {known.node} has: {most}"
                raise ConfigError.of(f"sandbox: {field_}", offered, fix)


def _check_agent(request: messages.ConnectRequest, hello: messages.Hello) -> None:
    _require("role", hello.role, "agent")
    if hello.node is None or agent_name(hello.node.node) != hello.worker:
        raise ConfigError.of("hello: worker", hello.worker, "must be agent:NODE of its node")
    if (hello.node.pool or "") != request.pool:
        fix = f"must be {request.pool!r}, the pool of its token; take a new one for another pool"
        raise ConfigError.of(f"node {hello.node.node}: pool", hello.node.pool, fix)
    if hello.node.certificate:
        fingerprint_of(hello.node.certificate)  # it goes to other nodes
    if any(facts is not None for facts in (hello.engine, hello.sandbox, hello.rewards)):
        raise ConfigError.of("hello", hello.worker, "must say what a node is")


def _check_engine(known: PlannedWorker, facts: messages.EngineFacts) -> None:
    _require("engine: base_model", facts.base_model, known.option("--base"))
    _require("engine: kind", facts.kind, known.option("--kind", "dedicated"))
    _require("engine: job", facts.job, None)
    if facts.node:
        _require("engine: node", facts.node, known.node)
    if facts.lends and "--lend" not in known.plan.arguments:
        raise ConfigError.of("engine: lends", True, "must be False: the plan does not let it lend")


def _check_loan(known: PlannedWorker, hello: messages.Hello) -> None:
    """A serving worker that was told to lend joins with the rollout's engine."""
    facts, lent = hello.engine, known.lent
    if known.plan.module != port.COSERVING or lent is None or facts is None or not known.joined:
        raise RefusedError(f"worker {hello.worker}: was not told to lend")
    _require("engine: kind", facts.kind, "borrowed")
    _require("engine: job", facts.job, lent.job)
    _require("engine: base_model", facts.base_model, lent.base)
    _require("engine: lends", facts.lends, False)


def _require(field_: str, claimed: object, planned: object) -> None:
    if claimed != planned:
        raise ConfigError.of(f"hello: {field_}", claimed, f"must be {planned!r}, as planned")
