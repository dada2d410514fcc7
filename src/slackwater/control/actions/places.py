"""Where things live: workers with what they bring, and the environments on them (ARL-Tangram 5.2).

An environment goes to the node with memory for its whole life where the largest share of memory is free. It stays there, with its memory, until it is
closed or lost; it holds no cores between actions.
"""

from slackwater.control.actions import commands as do
from slackwater.control.actions import events as on
from slackwater.control.actions.books import Books
from slackwater.control.actions.lanes import CoreLane
from slackwater.control.actions.live import EnvironmentState, LiveAction, LiveEnvironment
from slackwater.model.action import EnvironmentSpec, OutcomeKind
from slackwater.model.ids import EnvironmentId, NodeId


class Places:
    """Workers and environments come and go."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._line: dict[EnvironmentId, LiveEnvironment] = {}  # wait for memory, in order

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
        """A worker holds an environment that we know from the log; one that we do not know is removed."""
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
            books.gpus.running.pop(attempt.number, None)
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
        """A lane for an action that is bound to no environment: GPUs, a limit, or the node with the least to do."""
        books = self._books
        if action.spec.service is not None:
            books.enter(action, books.gpus)
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

    # ---- environments ----
    def asked(self, spec: EnvironmentSpec, now_s: float, state: EnvironmentState) -> None:
        books = self._books
        if spec.environment in books.environments:
            return
        rank = books.settings.order.rank(now_s, spec.priority, 0.0)
        environment = LiveEnvironment(spec, books.number(), rank, state)
        books.environments[spec.environment] = environment
        if state is EnvironmentState.AWAY:
            books.alarm(now_s + books.settings.return_s, f"away:{spec.environment}")
            return
        self._line[spec.environment] = environment
        self.place_waiting()

    def place_waiting(self) -> None:
        """Open environments in order, as far as memory goes."""
        books = self._books
        lanes = [lane for lane in books.nodes.values() if lane.cores.total]
        for environment in sorted(self._line.values(), key=lambda e: (e.rank, e.number)):
            need_mib = environment.spec.memory_mib
            largest = max((lane.capacity.memory_mib for lane in lanes), default=None)
            if largest is not None and need_mib > largest:
                why = f"it needs {need_mib} MiB and the largest node has {largest}"
                self.end(environment, OutcomeKind.REFUSED, why)
                continue
            able = [lane for lane in lanes if lane.free_mib >= need_mib]
            if not able:
                return
            lane = min(able, key=_fullness)
            del self._line[environment.spec.environment]
            self._hold(environment, lane, EnvironmentState.OPENING)
            books.out.append(do.OpenEnvironment(lane.node, environment.spec))

    @staticmethod
    def _hold(environment: LiveEnvironment, lane: CoreLane, state: EnvironmentState) -> None:
        environment.node, environment.state = lane.node, state
        lane.environments.add(environment.spec.environment)
        lane.free_mib -= environment.spec.memory_mib

    def opened(self, name: EnvironmentId) -> None:
        environment = self._books.environments.get(name)
        if environment is not None and environment.state is EnvironmentState.OPENING:
            environment.state = EnvironmentState.OPEN
            self._books.stir(environment)

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
        """All its actions end with it; what runs is stopped with the environment and reports as usual."""
        books = self._books
        name = environment.spec.environment
        del books.environments[name]
        self._line.pop(name, None)
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


def _fullness(lane: CoreLane) -> tuple[float, int, NodeId]:
    """The share of memory in use, then the number of environments."""
    used = 1 - lane.free_mib / lane.capacity.memory_mib if lane.capacity.memory_mib else 0.0
    return round(used, 6), len(lane.environments), lane.node
