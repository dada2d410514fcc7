"""Sandbox workers, and the environments on them (ARL-Tangram 5.2).

An environment opens on the node with the largest share of free memory and holds its memory until it
is closed or lost; it holds no cores between actions.
"""

from bisect import bisect_left, insort
from enum import Enum
from heapq import heapify, heappop, heappush

from slackwater.control.actions import commands, events
from slackwater.control.actions.broker_state import BrokerState
from slackwater.control.actions.lanes import CoreLane
from slackwater.control.actions.live import (
    Attempt,
    EnvironmentState,
    LiveAction,
    LiveEnvironment,
    TenantState,
)
from slackwater.model.action import EnvironmentSpec, OutcomeKind
from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.ids import EnvironmentId, NodeId, TenantId


class SandboxRegistry:
    """Adds and removes workers and environments, and places environments on nodes."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        # Environments that wait for memory, by tenant.
        self._queues: dict[TenantId, list[tuple[float, int, LiveEnvironment]]] = {}

    # ---- workers ----
    def add_worker(self, event: events.WorkerJoined) -> None:
        state = self._state
        if event.node in state.nodes:
            self.remove_worker(event.node, "its worker joined again")
        lane = CoreLane(event.node, event.capacity)
        state.nodes[event.node] = state.lanes[lane.name] = lane
        state.gpus.join(event.node, event.capacity)
        for spec in event.environments:
            self._readopt(spec, lane)
        self.place_waiting()
        for action in list(state.unplaced.values()):
            state.unplaced.pop(action.spec.action)
            self.find_node(action)
        state.touch(lane.name)
        state.touch(state.gpus.name)

    def _readopt(self, spec: EnvironmentSpec, lane: CoreLane) -> None:
        """Take over an environment of the log that a worker still has; close an unknown one."""
        environment = self._state.environments.get(spec.environment)
        fits = spec.memory_mib <= lane.free_mib
        if environment is None or environment.state is not EnvironmentState.AWAY or not fits:
            self._state.out.append(commands.CloseEnvironment(lane.node, spec.environment))
            return
        self._hold(environment, lane, EnvironmentState.OPEN)
        self._state.wake(environment)

    def remove_worker(self, node: NodeId, reason: str) -> None:
        """Drop a worker with all its environments; requeue its actions that may be retried."""
        state = self._state
        lane = state.nodes.pop(node, None)
        if lane is None:
            return
        state.gpus.leave(node)
        del state.lanes[lane.name]
        for resource, usage in state.limits.items():
            if usage.first_claims.pop(lane.name, None) is not None:
                state.touch_waiters(resource)
        why = f"worker {node} was lost: {reason}"
        gone = [attempt for attempt in state.attempts.values() if attempt.grant.node == node]
        for attempt in gone:
            state.gpus.end(attempt, state.now_s)
            if not attempt.outcome_reported:
                self._end_or_requeue(attempt, why)
            state.release(attempt)
        for name in sorted(lane.environments):
            self.end(state.environments[name], OutcomeKind.LOST, why)
        for action in list(lane):
            lane.remove(action)
            del state.queued[action.spec.action]
            self.find_node(action)
        for attempt in gone:
            if not attempt.outcome_reported:
                self.find_node(attempt.action)
        state.touch(state.gpus.name)
        self.refuse_impossible()

    def _end_or_requeue(self, attempt: Attempt, why: str) -> None:
        state, action = self._state, attempt.action
        if attempt.stopping is not None:
            state.end(action, attempt.stopping, attempt.stop_reason)
        elif action.retries_left > 0:
            action.retries_left -= 1
            state.count_waiting(action, 1)
        else:
            state.end(action, OutcomeKind.LOST, why)

    def find_node(self, action: LiveAction) -> None:
        """Find a lane for an action without an environment: GPUs, a limit, or the idlest node."""
        state = self._state
        if action.spec.service is not None:
            state.enqueue(action, state.gpus)
            return
        why = self._memory_refusal(action) if state.nodes else None
        if why is not None:
            state.end(action, OutcomeKind.REFUSED, why)
            return
        able = [lane for lane in state.nodes.values() if lane.refusal(action) is None]
        if able:
            state.enqueue(action, min(able, key=lambda lane: (lane.backlog, lane.node)))
        elif state.nodes:
            reasons = {lane.refusal(action) for lane in state.nodes.values()}
            state.end(
                action, OutcomeKind.REFUSED, f"no node can run it: {sorted(map(str, reasons))[0]}"
            )
        else:
            state.unplaced[action.spec.action] = action

    def steal(self, lane: CoreLane) -> None:
        """Move an action that is bound to no node from another node's queue to this idle node."""
        if len(lane) or not lane.free:
            return
        for other in self._state.nodes.values():
            for action in other.queue.first(4):
                if action.environment is None and self._fits_now(lane, action):
                    other.remove(action)
                    self._state.enqueue(action, lane)
                    return

    @staticmethod
    def _fits_now(lane: CoreLane, action: LiveAction) -> bool:
        if lane.refusal(action) is not None or action.limits:
            return False
        return action.curve.least <= lane.free and lane.has_memory(action, 0)

    def refuse_impossible(self) -> None:
        """Refuse waiting actions that no remaining node can run."""
        state = self._state
        if state.gpus.nodes:
            for action in list(state.gpus):
                why = state.gpus.refusal(action)
                if why is not None:
                    state.end(action, OutcomeKind.REFUSED, why)
        for lane in state.nodes.values():
            for action in list(lane):
                why = self._memory_refusal(action)
                if why is not None:
                    state.end(action, OutcomeKind.REFUSED, why)

    def _memory_refusal(self, action: LiveAction) -> str | None:
        """Why its tenant's share of all memory can never hold the action, or None."""
        most_mib = action.owner.limits.memory_of(self._state.memory_mib)
        if action.memory_mib <= most_mib:
            return None
        return _beyond_share(action.memory_mib, most_mib)

    # ---- environments ----
    def add_environment(
        self, spec: EnvironmentSpec, now_s: float, initial_state: EnvironmentState
    ) -> None:
        state = self._state
        if spec.environment in state.environments:
            return
        rank = state.settings.order.rank(now_s, spec.priority, 0.0)
        owner = state.tenant(spec.tenant)
        environment = LiveEnvironment(spec, state.number(), rank, initial_state, owner)
        why = None if initial_state is EnvironmentState.AWAY else _refusal(owner, spec)
        state.environments[spec.environment] = environment
        owner.environments += 1
        if why is not None:
            self.end(environment, OutcomeKind.REFUSED, why)
            return
        if initial_state is EnvironmentState.AWAY:
            state.set_alarm(now_s + state.settings.return_s, f"away:{spec.environment}")
            return
        insort(self._queues.setdefault(spec.tenant, []), (rank, environment.number, environment))
        owner.waiting_environments += 1
        self.place_waiting()

    def place_waiting(self) -> None:
        """Open waiting environments while memory lasts; the tenant that holds least goes first."""
        heads = [self._head(tenant) for tenant in self._queues]
        heapify(heads)
        while heads:
            tenant = heappop(heads)[-1]
            queue = self._queues.get(tenant)
            if queue is None:
                continue  # a refusal placed others, and so emptied this queue
            match self._place(queue[0][2]):
                case _Placement.NO_MEMORY:
                    return
                case _Placement.TENANT_FULL:
                    continue
            if tenant in self._queues:
                heappush(heads, self._head(tenant))

    def _head(self, tenant: TenantId) -> tuple[float, float, int, TenantId]:
        """The sort key of a tenant: the memory that it holds, then its first environment's."""
        rank, number, first = self._queues[tenant][0]
        return first.owner.held_by_weight, rank, number, tenant

    def _dequeue(self, environment: LiveEnvironment) -> None:
        queue = self._queues.get(environment.owner.tenant, [])
        position = (environment.rank, environment.number)
        index = bisect_left(queue, position, key=lambda entry: entry[:2])
        if index < len(queue) and queue[index][2] is environment:
            del queue[index]
            environment.owner.waiting_environments -= 1
            if not queue:
                del self._queues[environment.owner.tenant]

    def _place(self, environment: LiveEnvironment) -> "_Placement":
        state, need_mib, owner = self._state, environment.spec.memory_mib, environment.owner
        lanes = [lane for lane in state.nodes.values() if lane.cores.total]
        if not lanes:
            return _Placement.NO_MEMORY
        largest = max(lane.capacity.memory_mib for lane in lanes)
        most_mib = owner.limits.memory_of(state.memory_mib)
        if need_mib > min(largest, most_mib):
            why = f"it needs {need_mib} MiB and the largest node has {largest}"
            if need_mib <= largest:
                why = _beyond_share(need_mib, most_mib)
            self.end(environment, OutcomeKind.REFUSED, why)
            return _Placement.DONE
        if owner.held_mib + need_mib > most_mib:
            return _Placement.TENANT_FULL
        roomy = [lane for lane in lanes if lane.free_mib >= need_mib]
        if not roomy:
            return _Placement.NO_MEMORY
        # Opening one takes worker time: bound how many a tenant opens on a node at once.
        able = [lane for lane in roomy if lane.opening[owner.tenant] < lane.max_units_for(owner)]
        if not able:
            return _Placement.TENANT_FULL
        lane = min(able, key=_fullness)
        self._dequeue(environment)
        self._hold(environment, lane, EnvironmentState.OPENING)
        lane.opening[owner.tenant] += 1
        state.out.append(commands.OpenEnvironment(lane.node, environment.spec))
        return _Placement.DONE

    @staticmethod
    def _hold(
        environment: LiveEnvironment, lane: CoreLane, initial_state: EnvironmentState
    ) -> None:
        environment.node, environment.state = lane.node, initial_state
        lane.environments.add(environment.spec.environment)
        lane.free_mib -= environment.spec.memory_mib
        environment.owner.held_mib += environment.spec.memory_mib

    def confirm_open(self, name: EnvironmentId) -> None:
        environment = self._state.environments.get(name)
        if environment is not None and environment.state is EnvironmentState.OPENING:
            self._finish_opening(environment)
            environment.state = EnvironmentState.OPEN
            self._state.wake(environment)
            self.place_waiting()

    def _finish_opening(self, environment: LiveEnvironment) -> None:
        lane = self._state.nodes.get(environment.node) if environment.node is not None else None
        if lane is not None and environment.state is EnvironmentState.OPENING:
            lane.opening[environment.owner.tenant] -= 1

    def close_environment(self, name: EnvironmentId) -> None:
        """Its owner closed it."""
        environment = self._state.environments.get(name)
        if environment is not None:
            self.end(environment, OutcomeKind.CANCELLED, "its environment was closed")

    def lose_environment(self, name: EnvironmentId, reason: str) -> None:
        """Its worker lost it: end it and remove what is left."""
        environment = self._state.environments.get(name)
        if environment is not None and environment.node is not None:
            self.end(environment, OutcomeKind.LOST, f"its environment was lost: {reason}")

    def expire_absent(self, name: EnvironmentId) -> None:
        environment = self._state.environments.get(name)
        if environment is not None and environment.state is EnvironmentState.AWAY:
            self.end(environment, OutcomeKind.LOST, "its worker did not come back")

    def end(self, environment: LiveEnvironment, kind: OutcomeKind, reason: str) -> None:
        """End an environment with its actions; a running action's worker still reports its end."""
        state = self._state
        name = environment.spec.environment
        del state.environments[name]
        self._dequeue(environment)
        environment.owner.environments -= 1
        self._finish_opening(environment)
        if environment.node is not None:
            environment.owner.held_mib -= environment.spec.memory_mib
        for action in reversed(list(environment.queue)):
            state.end(action, kind, reason)
        lane = state.nodes.get(environment.node) if environment.node is not None else None
        if lane is not None:
            lane.environments.discard(name)
            lane.free_mib += environment.spec.memory_mib
            state.touch(lane.name)
            state.out.append(commands.CloseEnvironment(lane.node, name))
        if kind is not OutcomeKind.CANCELLED:
            state.out.append(commands.EndEnvironment(name, reason))
        self.place_waiting()


class _Placement(Enum):
    """The result of trying to place an environment on a node."""

    DONE = "done"  # it opens or was refused
    TENANT_FULL = "tenant full"  # other tenants may pass
    NO_MEMORY = "no memory"


def _beyond_share(need_mib: int, most_mib: int) -> str:
    return f"it needs {need_mib} MiB and its tenant may hold {most_mib} ([limits] memory_share)"


def _refusal(owner: TenantState, spec: EnvironmentSpec) -> str | None:
    """Why the tenant's limits exclude the environment, or None."""
    try:
        owner.check_environment(spec)
    except (ConfigError, UnavailableError) as error:
        return str(error)
    return None


def _fullness(lane: CoreLane) -> tuple[float, int, NodeId]:
    """The share of memory in use, then the number of environments."""
    used = 1 - lane.free_mib / lane.capacity.memory_mib if lane.capacity.memory_mib else 0.0
    return round(used, 6), len(lane.environments), lane.node
