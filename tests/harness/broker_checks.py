"""The action broker's invariants, for storms and tests."""

from collections import Counter

from slackwater.control.actions.broker import ActionBroker
from slackwater.control.actions.broker_state import BrokerState
from slackwater.control.actions.gpus import GpuLane
from slackwater.control.actions.lanes import CoreLane
from slackwater.control.actions.live import EnvironmentState
from slackwater.model.amounts import MEMORY_MIB


def check_broker(broker: ActionBroker) -> None:
    """Raise AssertionError if the parts of the state disagree, or a resource is granted twice."""
    state = broker.state
    counters = state.counters
    ended = sum(counters.ended.values())
    assert counters.submitted == len(state.actions) + ended, "an action was lost or ended twice"
    _check_actions(state)
    for number, attempt in state.attempts.items():
        assert attempt.number == number
        assert number in state.lanes[attempt.lane].running, f"attempt {number} holds nothing"
    assert sum(len(lane.running) for lane in state.lanes.values()) == len(state.attempts)
    for lane in state.nodes.values():
        _check_node(state, lane)
    _check_gpus(state)
    _check_limits(state)
    _check_environments(state)
    _check_tenants(state)


def _check_actions(state: BrokerState) -> None:
    waiting = 0
    here = {lane: {id(action) for action in lane} for lane in state.lanes.values()}
    assert state.queued.keys() <= state.actions.keys(), "an action that has ended waits in a lane"
    for name, action in state.actions.items():
        assert action.spec.action == name
        if action.attempt is not None:
            assert state.attempts[action.attempt.number] is action.attempt
            assert name not in state.queued and name not in state.unplaced
            continue
        waiting += 1
        behind = action.environment is not None and (
            action.environment.queue[0] is not action
            or not action.environment.ready
            or action.environment.busy is not None
        )
        places = (name in state.queued, name in state.unplaced, behind)
        assert sum(places) == 1, f"{name} waits in {sum(places)} places"
        assert name not in state.queued or id(action) in here[state.queued[name]]
    assert waiting == state.waiting == sum(t.waiting for t in state.tenants.values())


def _check_node(state: BrokerState, lane: CoreLane) -> None:
    held = [core for attempt in lane.running.values() for core in attempt.grant.cores]
    owned = [core for numa in lane.capacity.cores for core in numa]
    idle = [core for cores in lane.cores._free for core in cores]
    assert sorted(held + idle) == sorted(owned), f"{lane.node}: a core is held twice"
    assert lane.cores.free == len(idle)
    assert lane.queued_units == sum(action.curve.least for action in lane)
    used_mib = sum(attempt.grant.amount(MEMORY_MIB) for attempt in lane.running.values())
    used_mib += sum(state.environments[name].spec.memory_mib for name in lane.environments)
    assert lane.free_mib == lane.capacity.memory_mib - used_mib >= 0, f"{lane.node}: memory"


def _check_gpus(state: BrokerState) -> None:
    _check_gpu_memory(state.gpus)
    held: Counter[tuple[str, int]] = Counter()
    for attempt in state.gpus.running.values():
        grant = attempt.grant
        assert grant.node is not None
        assert grant.gpus[0] % len(grant.gpus) == 0, "a chunk is not aligned"
        held.update((grant.node, gpu) for gpu in grant.gpus)
    assert all(count == 1 for count in held.values()), "a GPU runs two actions"
    for node in state.gpus.nodes.values():
        busy = {gpu for name, gpu in held if name == node.node}
        assert busy | node.idle == set(range(node.count)) and not busy & node.idle


def _check_gpu_memory(lane: GpuLane) -> None:
    assert lane.free == sum(len(node.idle) for node in lane.nodes.values())
    for node in lane.nodes.values():
        assert node.idle <= set(range(node.count))
        for gpu in range(node.count):
            held_mib = sum(r.gpu_mib for r in node.residents if gpu in r.gpus)
            assert held_mib <= node.gpu_mib, f"{node.node} gpu {gpu} holds {held_mib} MiB"


def _check_limits(state: BrokerState) -> None:
    held: Counter[str] = Counter()
    for attempt in state.attempts.values():
        held.update(dict(attempt.action.limits))
    for resource, usage in state.limits.items():
        assert usage.running == held[resource] >= 0, f"{resource}: a place was lost"
        assert usage.recent == sum(units for _, units in usage._expiries)
        assert usage.first_claims.keys() <= state.lanes.keys(), "a lane that is gone keeps a claim"


def _check_environments(state: BrokerState) -> None:
    for name, environment in state.environments.items():
        placed = environment.state in (EnvironmentState.OPENING, EnvironmentState.OPEN)
        assert placed == (environment.node is not None)
        if environment.node is not None:
            assert name in state.nodes[environment.node].environments
        assert all(action.environment is environment for action in environment.queue)
        later = list(environment.queue)[1:]
        assert not any(action.attempt or action.spec.action in state.queued for action in later)


def _check_tenants(state: BrokerState) -> None:
    held: Counter[str] = Counter()
    for environment in state.environments.values():
        if environment.node is not None:
            held[environment.spec.tenant] += environment.spec.memory_mib
    for attempt in state.attempts.values():
        held[attempt.action.spec.tenant] += attempt.grant.amount(MEMORY_MIB)
    owned = Counter(environment.spec.tenant for environment in state.environments.values())
    lined = Counter(
        environment.spec.tenant
        for environment in state.environments.values()
        if environment.state is EnvironmentState.WAITING
    )
    for name, tenant in state.tenants.items():
        assert tenant.held_mib == held[name], f"{name}: memory of a tenant"
        assert tenant.environments == owned[name], f"{name}: environments of a tenant"
        assert tenant.waiting_environments == lined[name], f"{name}: environments that wait"
    for node in state.nodes.values():
        here = (state.environments[name] for name in node.environments)
        opening = (e.spec.tenant for e in here if e.state is EnvironmentState.OPENING)
        assert +node.opening == Counter(opening), f"{node.node}: environments that open"
    for lane in state.lanes.values():
        units: Counter[str] = Counter()
        for attempt in lane.running.values():
            units[attempt.action.spec.tenant] += attempt.units
        assert {k: v for k, v in lane.held_units.items() if v} == dict(units), f"{lane.name}: units"
