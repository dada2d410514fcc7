"""Clients whose trajectories are agents': turns, tool calls between them, and a reward."""

from abc import abstractmethod
from functools import partial

from slackwater.control.rollout import commands, events
from slackwater.model.ids import JobId, TrajectoryId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec
from slackwater.sim.fleet.clients import AskedTurn, SimulatedClients
from slackwater.sim.fleet.fleet import SimulatedFleet
from slackwater.sim.fleet.job import BASE_MODEL, SimulatedJob
from slackwater.sim.rollout.agent_trace import Session
from slackwater.sim.rollout.simulated_instances import SimulatedInstances
from slackwater.sim.slacks.cores import SimulatedCores


class AgentFleet(SimulatedFleet):
    """A fleet whose clients are agents: they use cores between turns."""

    cores: SimulatedCores
    engines: SimulatedInstances  # type: ignore[assignment]  # the same calls, with other costs

    @abstractmethod
    def sessions(self, job: SimulatedJob) -> list[Session]:
        """The trajectories of the job's present iteration."""

    @abstractmethod
    def reward_s(self, job: JobId) -> float:
        """How long a trajectory's reward takes."""


class SimulatedAgents(SimulatedClients):
    """Trains as every client does; an iteration is over when every trajectory has its reward.
    Unless `named`, a service cannot tell which turns are of one trajectory.
    """

    named = True

    def __init__(self, fleet: AgentFleet) -> None:
        super().__init__(fleet, fleet.trainers)
        self._slacks = fleet
        self._of: dict[TurnId, tuple[TrajectoryId, int, Session, int]] = {}
        self._left: dict[tuple[JobId, int, int], int] = {}
        self.ended_s: dict[JobId, float] = {}

    def _end(self, job: SimulatedJob) -> None:
        self.ended_s.setdefault(job.job, self._fleet.now_s)
        super()._end(job)

    def _roll_out(self, job: SimulatedJob) -> None:
        sessions = self._slacks.sessions(job)
        self._left[job.job, job.life, job.iteration] = len(sessions)
        for number, session in enumerate(sessions):
            name = TrajectoryId(f"{job.job}.{job.iteration}.{number}")
            self._slacks.cores.begin(partial(self._go_on, job, job.life, name, session, 0))

    def _go_on(
        self, job: SimulatedJob, life: int, name: TrajectoryId, session: Session, index: int
    ) -> None:
        fleet = self._slacks
        if not job.alive or job.life != life:
            fleet.cores.end()  # its driver is gone
            return
        wanted = session[index]
        job.asked_turns += 1
        turn = TurnId(f"{name}.{job.asked_turns}")
        self._of[turn] = (name, life, session, index)
        self.turns[turn] = AskedTurn(job, wanted.output_tokens, job.version)
        trajectory = name if self.named else TrajectoryId(turn)
        fleet.engines.trajectory_of[turn] = trajectory
        job.open_turns.add(turn)
        prompt, sampling = range(wanted.prompt_tokens), Sampling(wanted.output_tokens)
        of = (turn, trajectory, job.job, prompt, sampling, job.version)
        fleet.tell(events.TurnSubmitted(fleet.now_s, TurnSpec(*of, base_model=BASE_MODEL)))

    def _turn_completed(self, command: commands.CompleteTurn) -> None:
        turn, fleet = command.turn, self._slacks
        asked, found = self.turns.get(turn), self._of.pop(turn, None)
        if asked is None or found is None:
            return  # its driver is gone
        name, life, session, index = found
        job, made, version = asked.job, len(command.tokens), asked.version
        assert made == asked.tokens, f"{turn}: {made} tokens of {asked.tokens}"
        assert command.version == version, f"{turn} made with {command.version}, not {version}"
        self.completed += 1
        self._forget_turn(job, turn)
        if index + 1 < len(session):
            go_on = partial(self._go_on, job, life, name, session, index + 1)
            fleet.cores.act(turn, job.job, session[index].pause_s, go_on)
        else:
            done = partial(self._finish_trajectory, job, life)
            fleet.cores.act(f"{turn}.reward", job.job, fleet.reward_s(job.job), done)

    def _finish_trajectory(self, job: SimulatedJob, life: int) -> None:
        self._slacks.cores.end()
        if not job.alive or job.life != life:
            return
        key = (job.job, life, job.iteration)
        self._left[key] -= 1
        if not self._left[key]:
            del self._left[key]
            self._fleet.after(self._fleet.costs.handover_s, partial(self._train, job, life))

    def _turn_failed(self, turn: TurnId, error: str) -> None:
        """Asked again: an iteration needs all its responses."""
        asked, found = self.turns.get(turn), self._of.pop(turn, None)
        if asked is None or found is None:
            return
        assert "deadline" not in error, f"{turn} failed: {error}"
        self.failed += 1
        self._forget_turn(asked.job, turn)
        name, life, session, index = found
        self._go_on(asked.job, life, name, session, index)

    def _forget_turn(self, job: SimulatedJob, turn: TurnId) -> None:
        super()._forget_turn(job, turn)
        if self._of.pop(turn, None) is not None:  # its driver is gone
            self._slacks.cores.end()
        self._slacks.engines.trajectory_of.pop(turn, None)
