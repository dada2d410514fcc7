"""Workers with what they bring, and the environments on them (ARL-Tangram 5.2).

An environment goes to the node where the largest share of memory is free, and keeps its memory
there until it is closed or lost; it holds no cores between actions.
"""

from bisect import bisect_left, insort
from enum import Enum
from heapq import heapify, heappop, heappush

from slackwater.control.actions import commands as do
from slackwater.control.actions import events as on
from slackwater.control.actions.broker_state import BrokerState
from slackwater.control.actions.lanes import CoreLane
from slackwater.control.actions.live import EnvironmentState, LiveAction, LiveEnvironment
from slackwater.control.actions.tenants import TenantState
from slackwater.model.action import EnvironmentSpec, OutcomeKind
from slackwater.model.errors import ConfigError
from slackwater.model.ids import EnvironmentId, NodeId, TenantId
from slackwater.model.tenant_limits import check_environment


class SandboxRegistry:
    """Workers and environments come and go."""

    def __init__(self, books: BrokerState) -> None:
        self._books = books
        # Those that wait for memory, each tenant's in order.
        self._lines: dict[TenantId, list[tuple[float, int, LiveEnvironment]]] = {}

    # ---- workers ----
    def joined(self, event: on.WorkerJoined) -> None:
        books = self._books
        if event.node in books.nodes:
            self.lost(event.node, "its worker came back anew")
        lane = CoreLane(event.node, event.capacity)
        books.nodes[event.node] = books.lanes[lane.name] = lane
        books.gpus.pool.join(event.node, event.capacity)
        for spec in event.environments:
            self._came_back(spec, lane)
        self.place_waiting()
        for action in list(books.homeless.values()):
            books.homeless.pop(action.spec.action)
            self.find_node(action)
        books.touch(lane.name)
        books.touch(books.gpus.name)

    def _came_back(self, spec: EnvironmentSpec, lane: CoreLane) -> None:
        """Adopt an environment that the log knows from its worker; close one it does not know."""
        environment = self._books.environments.get(spec.environment)
        fits = spec.memory_mib <= lane.free_mib
        if environment is None or environment.state is not EnvironmentState.AWAY or not fits:
            self._books.out.append(do.CloseEnvironment(lane.node, spec.environment))
            return
        self._hold(environment, lane, EnvironmentState.OPEN)
        self._books.stir(environment)

    def lost(self, node: NodeId, reason: str) -> None:
        """Everything on it is gone: what ran there is run again if it may be."""
        books = self._books
        lane = books.nodes.pop(node, None)
        if lane is None:
            return
        books.gpus.pool.leave(node)
        del books.lanes[lane.name]
        for resource, book in books.limits.items():
            if book.blocked.pop(lane.name, None) is not None:
                books.touch_waiters(resource)
        gone = [attempt for attempt in books.attempts.values() if attempt.grant.node == node]
        for attempt in gone:
            books.gpus.end(attempt, books.now_s)
            self._end_or_requeue(attempt.action, f"worker {node} was lost: {reason}", attempt.told)
            books.release(attempt)
        for name in sorted(lane.environments):
            self.end(
                books.environments[name], OutcomeKind.LOST, f"worker {node} was lost: {reason}"
            )
        for action in list(lane):
            lane.remove(action)
            action.lane = None
            self.find_node(action)
        for attempt in gone:
            if not attempt.told:
                self.find_node(attempt.action)
        books.touch(books.gpus.name)
        self.refuse_impossible()

    def _end_or_requeue(self, action: LiveAction, why: str, told: bool) -> None:
        if told:
            return
        books, attempt = self._books, action.attempt
        assert attempt is not None
        if attempt.stopping is not None:
            books.end(action, attempt.stopping, attempt.stop_reason)
        elif action.tries_left > 0:
            action.tries_left -= 1
            books.count_waiting(action, 1)
        else:
            books.end(action, OutcomeKind.LOST, why)

    def find_node(self, action: LiveAction) -> None:
        """Find a lane for an action without an environment: GPUs, a limit, or the idlest node."""
        books = self._books
        if action.spec.service is not None:
            books.enter(action, books.gpus)
            return
        why = self._too_much(action) if books.nodes else None
        if why is not None:
            books.end(action, OutcomeKind.REFUSED, why)
            return
        able = [lane for lane in books.nodes.values() if lane.refusal(action) is None]
        if able:
            books.enter(action, min(able, key=lambda lane: (lane.backlog, lane.node)))
        elif books.nodes:
            reasons = {lane.refusal(action) for lane in books.nodes.values()}
            books.end(
                action, OutcomeKind.REFUSED, f"no node can run it: {sorted(map(str, reasons))[0]}"
            )
        else:
            books.homeless[action.spec.action] = action

    def steal(self, lane: CoreLane) -> None:
        """An idle node takes over what waits at another and is bound to none."""
        if len(lane) or not lane.free:
            return
        for other in self._books.nodes.values():
            for action in other.first(4):
                if action.environment is None and self._fits_now(lane, action):
                    other.remove(action)
                    self._books.enter(action, lane)
                    return

    @staticmethod
    def _fits_now(lane: CoreLane, action: LiveAction) -> bool:
        if lane.refusal(action) is not None or action.limits:
            return False
        return action.curve.least <= lane.free and lane.has_memory(action, 0)

    def refuse_impossible(self) -> None:
        """A node left: actions that only it could have run are refused, not kept for ever."""
        books = self._books
        if books.gpus.pool.nodes:
            for action in list(books.gpus):
                why = books.gpus.refusal(action)
                if why is not None:
                    books.end(action, OutcomeKind.REFUSED, why)
        for lane in books.nodes.values():
            for action in list(lane):
                why = self._too_much(action)
                if why is not None:
                    books.end(action, OutcomeKind.REFUSED, why)

    def _too_much(self, action: LiveAction) -> str | None:
        """Why its tenant's share of the memory that there is now can never hold it, if so."""
        most_mib = action.owner.limits.memory_of(self._books.memory_mib)
        if action.memory_mib <= most_mib:
            return None
        return _beyond_share(action.memory_mib, most_mib)

    # ---- environments ----
    def asked(self, spec: EnvironmentSpec, now_s: float, state: EnvironmentState) -> None:
        books = self._books
        if spec.environment in books.environments:
            return
        rank = books.settings.order.rank(now_s, spec.priority, 0.0)
        owner = books.tenant(spec.tenant)
        environment = LiveEnvironment(spec, books.number(), rank, state, owner)
        why = None if state is EnvironmentState.AWAY else refusal(owner, spec)
        books.environments[spec.environment] = environment
        owner.environments += 1
        if why is not None:
            self.end(environment, OutcomeKind.REFUSED, why)
            return
        if state is EnvironmentState.AWAY:
            books.alarm(now_s + books.settings.return_s, f"away:{spec.environment}")
            return
        insort(self._lines.setdefault(spec.tenant, []), (rank, environment.number, environment))
        owner.waiting_environments += 1
        self.place_waiting()

    def place_waiting(self) -> None:
        """Open environments while memory lasts: the tenant that holds least first."""
        heads = [self._head(tenant) for tenant in self._lines]
        heapify(heads)
        while heads:
            tenant = heappop(heads)[-1]
            line = self._lines.get(tenant)
            if line is None:
                continue  # one that was refused let others in
            match self._place(line[0][2]):
                case _Placing.NO_MEMORY:
                    return
                case _Placing.TENANT_FULL:
                    continue
            if tenant in self._lines:
                heappush(heads, self._head(tenant))

    def _head(self, tenant: TenantId) -> tuple[float, float, int, TenantId]:
        """The place of a tenant among tenants: by the memory that it holds."""
        rank, number, first = self._lines[tenant][0]
        return first.owner.held_by_weight, rank, number, tenant

    def _unline(self, environment: LiveEnvironment) -> None:
        line = self._lines.get(environment.owner.tenant, [])
        place = (environment.rank, environment.number)
        index = bisect_left(line, place, key=lambda entry: entry[:2])
        if index < len(line) and line[index][2] is environment:
            del line[index]
            environment.owner.waiting_environments -= 1
            if not line:
                del self._lines[environment.owner.tenant]

    def _place(self, environment: LiveEnvironment) -> "_Placing":
        books, need_mib, owner = self._books, environment.spec.memory_mib, environment.owner
        lanes = [lane for lane in books.nodes.values() if lane.cores.total]
        if not lanes:
            return _Placing.NO_MEMORY
        largest = max(lane.capacity.memory_mib for lane in lanes)
        most_mib = owner.limits.memory_of(books.memory_mib)
        if need_mib > min(largest, most_mib):
            why = f"it needs {need_mib} MiB and the largest node has {largest}"
            if need_mib <= largest:
                why = _beyond_share(need_mib, most_mib)
            self.end(environment, OutcomeKind.REFUSED, why)
            return _Placing.DONE
        if owner.held_mib + need_mib > most_mib:
            return _Placing.TENANT_FULL
        roomy = [lane for lane in lanes if lane.free_mib >= need_mib]
        if not roomy:
            return _Placing.NO_MEMORY
        # To open one is work for the node's worker, of which others want their part too.
        able = [lane for lane in roomy if lane.opening[owner.tenant] < lane.most_for(owner)]
        if not able:
            return _Placing.TENANT_FULL
        lane = min(able, key=_fullness)
        self._unline(environment)
        self._hold(environment, lane, EnvironmentState.OPENING)
        lane.opening[owner.tenant] += 1
        books.out.append(do.OpenEnvironment(lane.node, environment.spec))
        return _Placing.DONE

    @staticmethod
    def _hold(environment: LiveEnvironment, lane: CoreLane, state: EnvironmentState) -> None:
        environment.node, environment.state = lane.node, state
        lane.environments.add(environment.spec.environment)
        lane.free_mib -= environment.spec.memory_mib
        environment.owner.held_mib += environment.spec.memory_mib

    def opened(self, name: EnvironmentId) -> None:
        environment = self._books.environments.get(name)
        if environment is not None and environment.state is EnvironmentState.OPENING:
            self._opened_or_gone(environment)
            environment.state = EnvironmentState.OPEN
            self._books.stir(environment)
            self.place_waiting()

    def _opened_or_gone(self, environment: LiveEnvironment) -> None:
        lane = self._books.nodes.get(environment.node) if environment.node is not None else None
        if lane is not None and environment.state is EnvironmentState.OPENING:
            lane.opening[environment.owner.tenant] -= 1

    def closed(self, name: EnvironmentId) -> None:
        """Its owner is done with it."""
        environment = self._books.environments.get(name)
        if environment is not None:
            self.end(environment, OutcomeKind.CANCELLED, "its environment was closed")

    def died(self, name: EnvironmentId, reason: str) -> None:
        """Its worker lost it; what is left of it is removed."""
        environment = self._books.environments.get(name)
        if environment is not None and environment.node is not None:
            self.end(environment, OutcomeKind.LOST, f"its environment was lost: {reason}")

    def not_back(self, name: EnvironmentId) -> None:
        environment = self._books.environments.get(name)
        if environment is not None and environment.state is EnvironmentState.AWAY:
            self.end(environment, OutcomeKind.LOST, "its worker did not come back")

    def end(self, environment: LiveEnvironment, kind: OutcomeKind, reason: str) -> None:
        """End it with its actions; a running one is stopped with it and reports as usual."""
        books = self._books
        name = environment.spec.environment
        del books.environments[name]
        self._unline(environment)
        environment.owner.environments -= 1
        self._opened_or_gone(environment)
        if environment.node is not None:
            environment.owner.held_mib -= environment.spec.memory_mib
        for action in reversed(list(environment.line)):
            books.end(action, kind, reason)
        lane = books.nodes.get(environment.node) if environment.node is not None else None
        if lane is not None:
            lane.environments.discard(name)
            lane.free_mib += environment.spec.memory_mib
            books.touch(lane.name)
            books.out.append(do.CloseEnvironment(lane.node, name))
        if kind is not OutcomeKind.CANCELLED:
            books.out.append(do.EndEnvironment(name, reason))
        self.place_waiting()


class _Placing(Enum):
    """What became of an environment that waited for a node."""

    DONE = "done"  # it opens, or was refused
    TENANT_FULL = "tenant full"  # others need not wait for it
    NO_MEMORY = "no memory"


def _beyond_share(need_mib: int, most_mib: int) -> str:
    return f"it needs {need_mib} MiB and its tenant may hold {most_mib} ([limits] memory_share)"


def refusal(owner: TenantState, spec: EnvironmentSpec) -> str | None:
    """Why the tenant may not have it, whatever is free."""
    try:
        check_environment(spec, owner.limits)
    except ConfigError as error:
        return str(error)
    return owner.no_environment()


def _fullness(lane: CoreLane) -> tuple[float, int, NodeId]:
    """The share of memory in use, then the number of environments."""
    used = 1 - lane.free_mib / lane.capacity.memory_mib if lane.capacity.memory_mib else 0.0
    return round(used, 6), len(lane.environments), lane.node
