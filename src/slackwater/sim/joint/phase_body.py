"""What the co-scheduler says, carried out on a joint fleet: jobs start and stop, phases begin and end."""

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, assert_never

from slackwater.control.brain import BrainEvent
from slackwater.control.coschedule import commands as do
from slackwater.control.coschedule import events as on
from slackwater.control.jobs import events as of_job
from slackwater.control.rollout import events as of_rollout
from slackwater.control.steps import events as of_step
from slackwater.control.timer import SetTimer
from slackwater.control.weights.events import WeightsPublished, WeightsRetired
from slackwater.model.ids import InstanceId, NodeId, WorkerId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.placement import Phase
from slackwater.sim.joint.job_run import JobRun

if TYPE_CHECKING:
    from slackwater.sim.joint.fleet import JointFleet

TAIL_SHARE = 0.8
_TRAIN_SLICES = 20  # a training phase goes on at the pace of the moment, looked at so often


class PhaseBody:
    """Knows which permit is whose."""

    def __init__(self, fleet: "JointFleet") -> None:
        self._fleet = fleet
        self.iterations = 0
        self.tail_migrations = 0
        self.crashes = 0

    def obey(self, command: do.Command) -> None:
        fleet = self._fleet
        match command:
            case do.StartJob():
                self._start(command)
            case do.StopJob(job, _, moves, reason):
                self.stop(fleet.runs[job], reason, crashed=not moves)
            case do.GrantPermit():
                self._granted(command)
            case do.ShrinkRollout(permit, job):
                self._shrink(fleet.runs[job], permit)
            case do.HoldJob():
                pass  # the brain has told the job book
            case do.RefuseJob(job):
                fleet.runs[job].over = True
                fleet.unsettled -= 1
            case SetTimer():
                pass  # all timers are set in one place
            case do.RentNodes(nodes):
                fleet.rented.update(nodes)
            case do.ReturnNodes(nodes):
                fleet.rented.difference_update(nodes)
            case _:
                assert_never(command)

    # ---- a job's life ----
    def _start(self, command: do.StartJob) -> None:
        fleet = self._fleet
        run = fleet.runs[command.job]
        run.epoch = command.epoch
        run.iteration = command.iterations_done
        run.rollout_nodes, run.train_nodes = command.rollout_nodes, command.train_nodes
        fleet.after(fleet.costs.load_s, partial(self._loaded, run, run.epoch, run.serial))

    def _loaded(self, run: JobRun, epoch: int, serial: int) -> None:
        if (run.epoch, run.serial) != (epoch, serial):
            return
        if run.iteration < run.spec.iterations:
            self._publish(run)
            self._request(run, Phase.ROLLOUT)
        else:  # it was stopped in the sync after its last iteration
            self._complete(run)

    def _publish(self, run: JobRun) -> None:
        fleet = self._fleet
        fleet.tell(WeightsPublished(fleet.now_s, run.job, run.version, run.job, run.job))
        if run.iteration:
            fleet.tell(WeightsRetired(fleet.now_s, run.version_of(run.iteration - 1)))

    def _request(self, run: JobRun, phase: Phase) -> None:
        fleet = self._fleet
        fleet.tell(on.PhaseRequested(fleet.now_s, run.job, run.epoch, phase, run.iteration))

    def _complete(self, run: JobRun) -> None:
        fleet = self._fleet
        epoch, run.epoch = run.epoch, 0
        run.over = True
        fleet.unsettled -= 1
        fleet.tell(on.JobFinished(fleet.now_s, run.job, epoch))
        fleet.tell(of_job.JobEnded(fleet.now_s, run.job, "finished"))
        fleet.tell(WeightsRetired(fleet.now_s, run.version_of(run.iteration)))
        fleet.tell(WeightsRetired(fleet.now_s, run.version_of(run.iteration - 1)))

    def stop(self, run: JobRun, reason: str, *, crashed: bool) -> None:
        """Its processes end where they are; after a crash its owner brings it back."""
        fleet, now_s = self._fleet, self._fleet.now_s
        events: list[BrainEvent] = []
        for turn in sorted(run.open_turns):
            fleet.turns.give_up(turn)
            events.append(of_rollout.TurnCancelled(now_s, turn))
        events += self._engines_end(run, reason)
        if run.trainer is not None:
            events.append(of_step.TrainerGone(now_s, run.trainer))
        if run.permit is not None:
            fleet.permits.pop(run.permit, None)
        run.stop()
        fleet.tell_all(events)
        if crashed:
            self.crashes += 1
            fleet.after(fleet.costs.repair_s, partial(self._repaired, run, reason))

    def _repaired(self, run: JobRun, reason: str) -> None:
        self._fleet.tell(of_job.JobCrashed(self._fleet.now_s, run.job, reason))

    def crash(self, run: JobRun, reason: str) -> None:
        """The job's own processes die."""
        epoch = run.epoch
        self.stop(run, reason, crashed=True)
        self._fleet.tell(on.JobDied(self._fleet.now_s, run.job, epoch))

    # ---- phases ----
    def _granted(self, command: do.GrantPermit) -> None:
        fleet = self._fleet
        run = fleet.runs[command.job]
        assert run.epoch == command.epoch and run.permit is None
        run.permit, run.phase = command.permit, command.phase
        run.phase_began_s = fleet.now_s
        fleet.permits[command.permit] = (command.job, command.phase, command.nodes)
        begin = self._roll_out if command.phase is Phase.ROLLOUT else self._train
        delay_s = fleet.costs.switch_s if command.switch else 0.0
        fleet.after(delay_s, partial(self._still, run, command.permit, begin))

    @staticmethod
    def _still(run: JobRun, permit: int, begin: Callable[[JobRun], None]) -> None:
        if run.permit == permit:
            begin(run)

    def _roll_out(self, run: JobRun) -> None:
        run.shrunk = run.tail_said = False
        for node in run.rollout_nodes:
            self.bring_engine(run, node)
        self._fleet.turns.submit(run)

    def bring_engine(self, run: JobRun, node: NodeId) -> None:
        """One engine of the job on a node that its permit covers."""
        fleet = self._fleet
        run.serial += 1
        name = InstanceId(f"{run.job}/{node}/{run.serial}")
        kind = InstanceKind.LOCAL if run.local else InstanceKind.DEDICATED
        cap = ceil(fleet.plan.turns / len(run.rollout_nodes))  # so that all its nodes get turns
        spec = InstanceSpec(
            *(name, kind, cap, 4096, 1 << 20),
            max_versions=2,
            job=run.job,
            base_model=run.job,
            place=node,
        )
        run.engines[name] = node
        fleet.node_of[name] = node
        if run.local:
            fleet.tell(of_step.LocalEngineUp(fleet.now_s, spec))
        else:
            fleet.turns.join(spec)

    def _shrink(self, run: JobRun, permit: int) -> None:
        """The last turns move to a few of the engines; the others' nodes are free for the next job."""
        if run.permit != permit:
            return  # the job stopped: its turns, cancelled one by one, looked like a tail on their way out
        run.shrunk = True
        self.tail_migrations += 1
        keeper = self._fleet.brain.phases
        held = None if keeper is None else keeper.find(run.job)
        assert held is not None and held.hold is not None
        if held.hold.kept is None:
            return  # it has no engine just now: the next one that comes is its own
        for instance in sorted(set(run.engines) - set(held.hold.kept)):
            self._fleet.tell(of_rollout.DrainAsked(self._fleet.now_s, instance, move_turns=True))

    def turn_ended(self, run: JobRun) -> None:
        """One response less to wait for: the tail, or the end, may be reached."""
        fleet = self._fleet
        if run.permit is None or run.phase is not Phase.ROLLOUT:
            return
        left = len(run.open_turns)
        if left and not run.tail_said and left <= (1 - TAIL_SHARE) * fleet.plan.turns:
            run.tail_said = True
            fleet.tell(on.TailReached(fleet.now_s, run.job, run.permit))
        if left == 0:
            self._end_rollout(run)

    def _end_rollout(self, run: JobRun) -> None:
        fleet = self._fleet
        fleet.tell_all(self._engines_end(run, "its phase is over"))
        self._end_phase(run)
        if run.epoch:
            ready = partial(self._ready_to_train, run, run.epoch, run.serial)
            fleet.after(fleet.costs.handover_s, ready)

    def _ready_to_train(self, run: JobRun, epoch: int, serial: int) -> None:
        if (run.epoch, run.serial) == (epoch, serial):
            self._request(run, Phase.TRAIN)

    def _engines_end(self, run: JobRun, reason: str) -> list[BrainEvent]:
        """Its engines' processes end; what the brain is to hear of it."""
        fleet, now_s = self._fleet, self._fleet.now_s
        events: list[BrainEvent] = []
        for instance in list(run.engines):
            fleet.instances.pop(instance, None)
            events.append(of_rollout.InstanceLost(now_s, instance, reason))
        run.engines.clear()
        return events

    def _end_phase(self, run: JobRun) -> None:
        fleet = self._fleet
        assert run.permit is not None
        permit, run.permit, run.phase = run.permit, None, None
        del fleet.permits[permit]
        work_s = fleet.now_s - run.phase_began_s
        fleet.tell(on.PhaseFinished(fleet.now_s, run.job, permit, work_s))

    def _train(self, run: JobRun) -> None:
        fleet = self._fleet
        run.serial += 1
        run.trainer = WorkerId(f"{run.job}/trainer/{run.serial}")
        fleet.tell(of_step.DevicesWanted(fleet.now_s, run.trainer, run.job))
        fleet.tell(of_step.DevicesAsked(fleet.now_s, run.trainer, run.job))

    def devices_granted(self, trainer: WorkerId) -> None:
        """The step book lets a trainer begin."""
        fleet = self._fleet
        run = next((run for run in fleet.runs.values() if run.trainer == trainer), None)
        assert run is not None and not run.training, f"{trainer} was granted devices unasked"
        run.training = True
        self._train_on(run, trainer, fleet.now_s, _TRAIN_SLICES)

    def _train_on(self, run: JobRun, trainer: WorkerId, began_s: float, slices: int) -> None:
        """So many slices of the phase are left; each is as long as the machine lets it be."""
        fleet = self._fleet
        if run.trainer != trainer:
            return
        if not slices:
            self._trained(run, trainer, fleet.now_s - began_s)
            return
        whole_s = run.lengths.train_s_on(len(run.train_nodes))
        slice_s = whole_s / _TRAIN_SLICES / fleet.pace()
        fleet.after(slice_s, partial(self._train_on, run, trainer, began_s, slices - 1))

    def _trained(self, run: JobRun, trainer: WorkerId, took_s: float) -> None:
        fleet = self._fleet
        if run.trainer != trainer:
            return
        silent_s = max((fleet.silent(node) for node in run.train_nodes), default=0.0)
        if silent_s:
            fleet.after(silent_s, partial(self._trained, run, trainer, took_s))
            return
        run.trainer, run.training = None, False
        fleet.tell(of_step.DevicesReturned(fleet.now_s, trainer, took_s, ends_step=True))
        fleet.tell(of_job.JobTrained(fleet.now_s, run.job, took_s))
        run.iteration += 1
        run.iterations_done = run.iteration
        self.iterations += 1
        self._end_phase(run)
        sync_s = 0.0 if run.local else run.lengths.sync_s
        fleet.after(sync_s, partial(self._synced, run, run.epoch, run.serial))

    def _synced(self, run: JobRun, epoch: int, serial: int) -> None:
        if (run.epoch, run.serial) != (epoch, serial) or not epoch:
            return
        if run.iteration == run.spec.iterations:
            self._complete(run)
            return
        self._publish(run)
        self._request(run, Phase.ROLLOUT)
