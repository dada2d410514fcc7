"""A fleet in virtual time under the complete fleet controller, with the live limits.

Nodes have an engine and, in the train pool, a trainer; jobs are clients that submit turns and
operations. The same code as in a service infers phases, makes orders wait for devices and permits,
and requests loans. `check_integrity` holds after every event.
"""

from collections.abc import Callable
from functools import partial

from slackwater.control.coschedule.events import NodeLost
from slackwater.control.fleet.messages import FleetCommand
from slackwater.control.weights.events import WeightsPublished
from slackwater.model.ids import NodeId
from slackwater.model.placement import Phase
from slackwater.sim.fleet.clients import ClientCommand, SimulatedClients
from slackwater.sim.fleet.context import FleetContext
from slackwater.sim.fleet.engines import EngineCommand, SimulatedEngines
from slackwater.sim.fleet.job import BASE_MODEL
from slackwater.sim.fleet.serving import ServingCommand, ServingNodes
from slackwater.sim.fleet.trainers import SimulatedTrainers, TrainerCommand


class SimulatedFleet(FleetContext):
    """Engines, trainers, clients and services execute the controller's commands."""

    serving: ServingNodes | None = None

    def _open(self) -> None:
        self.trainers = SimulatedTrainers(self)
        self.clients = SimulatedClients(self, self.trainers)
        self.engines = SimulatedEngines(self, self.clients)

    def _start(self) -> None:
        self.tell(WeightsPublished(0.0, None, "base", BASE_MODEL))
        for place in self.scheduler.places:
            self.engines.start(place)
            if place.startswith("train"):
                self.trainers.start(place)
        if self.serving is not None:
            self.serving.start()
        for job in self.jobs.values():
            self.queue.push(job.spec.arrival_s, partial(self.clients.submit, job))

    def run(self, until_s: float = float("inf"), stop: Callable[[], bool] = lambda: False) -> None:
        """Run until every job has ended, `stop()`, or the time limit."""
        while self.unsettled and self.now_s < until_s and not stop():
            assert len(self.queue), f"no event is left for {self.describe_unfinished()}"
            self.queue.pop()()

    def describe_unfinished(self) -> list[str]:
        """The first jobs that have not ended, for error messages."""
        return [
            f"{job.job} (iteration {job.iteration}, {len(job.open_turns)} turns, "
            f"{len(job.open_ops)} operations)"
            for job in self.jobs.values()
            if not job.over
        ][:5]

    def _execute(self, command: FleetCommand) -> None:
        self._note(command)
        if isinstance(command, EngineCommand):
            self.engines.execute(command)
        elif isinstance(command, TrainerCommand):
            self.trainers.execute(command)
        elif isinstance(command, ClientCommand):
            self.clients.execute(command)
        elif isinstance(command, ServingCommand):
            assert self.serving is not None
            self.serving.execute(command)

    # ---- faults ----
    def lose_node(self, node: NodeId) -> None:
        """The node is lost with its processes; another takes its place."""
        self.engines.lose_node(node)
        self.trainers.lose_node(node, "its node was lost")
        self.tell(NodeLost(self.now_s, node))

    # ---- invariants ----
    def _check_event(self) -> None:
        """Checked fleets verify their invariants."""

    def record_start(self, place: NodeId, role: str) -> None:
        """Checked fleets allocate devices."""

    def check_integrity(self) -> None:
        """Raise AssertionError if work runs without a permit, or an open turn was lost."""
        for record in self.controller.rollout.state.instances:
            place = record.spec.place  # None for instances that need no permit
            for turn in record.attempts.values():
                job = turn.spec.job
                assert self.has_permit(job, Phase.ROLLOUT, place), (
                    f"{job} runs turns on {record.spec.instance} without a permit"
                )
        gates = self.controller.operations.gates()
        for job, phase, nodes in self.permits.values():
            if phase is Phase.TRAIN:
                assert gates.get(job) == nodes, f"{job} trains on {nodes}, gated to {gates}"
        live = self.controller.rollout.state.turns
        for job_run in self.jobs.values():
            lost = {turn for turn in job_run.open_turns if turn not in live}
            assert not lost, f"{job_run.job}: turns were lost: {lost}"
