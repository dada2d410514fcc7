"""What the brain says, carried out on a joint fleet: engines pull, run turns and send tokens."""

from functools import partial
from typing import TYPE_CHECKING

from slackwater.control.brain import BrainCommand
from slackwater.control.rollout import commands as do
from slackwater.control.rollout import events as on
from slackwater.control.steps import commands as step_do
from slackwater.control.steps.events import StepExpected
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.control.weights import commands as weight_do
from slackwater.control.weights.events import InstanceReady
from slackwater.model.ids import InstanceId, NodeId, TrajectoryId, TurnId
from slackwater.model.instance import InstanceSpec
from slackwater.model.sampling import Sampling
from slackwater.model.turn import FinishReason, TurnSpec
from slackwater.sim.joint.job_run import JobRun
from slackwater.sim.rollout.storm_instance import StormInstance, StormRequest, true_token

if TYPE_CHECKING:
    from slackwater.sim.joint.fleet import JointFleet

BEAT_S = 30.0
PROMPT_TOKENS = 16


class BrainBody:
    """Engines are held to the truth: a turn's tokens are known beforehand, and checked when it is complete."""

    def __init__(self, fleet: "JointFleet") -> None:
        self._fleet = fleet
        self.hidden: dict[TurnId, int] = {}
        self._version: dict[TurnId, str] = {}
        self._run_of: dict[TurnId, JobRun] = {}
        self._timers: dict[str, float] = {}
        self.completed = self.failed = self.pulls = 0
        self.deleted: set[str] = set()

    def obey(self, command: BrainCommand) -> None:
        match command:
            case do.Dispatch():
                self._reach(command.instance, partial(self._receive, command))
            case do.AbortOn(instance, attempt):
                self._reach(instance, partial(self._forget, instance, attempt))
            case SetTimer(name, at_s):
                self._timers[name] = at_s
                fleet = self._fleet
                fleet.queue.push(max(at_s, fleet.now_s), partial(self._fire, name, at_s))
            case do.CompleteTurn():
                self._complete(command)
            case do.FailTurn(turn, error):
                self._fail(turn, error)
            case do.ReleaseInstance(instance, reason):
                self._released(instance, reason)
            case weight_do.PullWeights(instance, version):
                assert version not in self.deleted, f"{instance} pulls {version}, which is deleted"
                self.pulls += 1
                self._reach(
                    instance, partial(self._pulled, instance, version), self._fleet.costs.pull_s
                )
            case weight_do.DropVersion(instance, version):
                self._reach(instance, partial(self._dropped, instance, version))
            case weight_do.DeleteVersion(version):
                self.deleted.add(version)
            case _:
                self._obey_book(command)

    def _obey_book(self, command: BrainCommand) -> None:
        match command:
            case step_do.StartEngine(spec):
                self._fleet.after(self._fleet.costs.start_s, partial(self._start, spec))
            case step_do.RestEngine(instance):
                self._fleet.instances.pop(instance, None)
            case step_do.GrantDevices(trainer):
                self._fleet.phases.devices_granted(trainer)
            case _:
                pass  # for people, or about what is not simulated

    def _fire(self, name: str, at_s: float) -> None:
        if self._timers.get(name) == at_s:
            del self._timers[name]
            self._fleet.tell(TimerFired(self._fleet.now_s, name))

    # ---- turns ----
    def submit(self, run: JobRun) -> None:
        """All turns of the iteration; those of an earlier try have other names, and the same lengths."""
        fleet = self._fleet
        lengths = fleet.plan.lengths(fleet.seed * 1000 + run.number, run.iteration)
        if run.local:
            fleet.tell(StepExpected(fleet.now_s, run.job, len(lengths)))
        for number, tokens in enumerate(lengths):
            self.ask(run, f"{run.job}.{run.iteration}.{number}", tokens)

    def ask(self, run: JobRun, trajectory: str, tokens: int) -> None:
        """One turn."""
        fleet = self._fleet
        run.asked_turns += 1
        turn = TurnId(f"{trajectory}.{run.asked_turns}")
        self.hidden[turn], self._version[turn], self._run_of[turn] = tokens, run.version, run
        run.open_turns.add(turn)
        spec = TurnSpec(
            *(turn, TrajectoryId(turn), run.job, (1,) * PROMPT_TOKENS),
            Sampling(fleet.plan.max_tokens),
            run.version,
            base_model=run.job,
        )
        fleet.tell(on.TurnSubmitted(fleet.now_s, spec))

    def _complete(self, command: do.CompleteTurn) -> None:
        turn = command.turn
        run = self._run_of.pop(turn, None)
        if run is None:
            return  # given up while it was on its way
        version, total = self._version.pop(turn), self.hidden.pop(turn)
        assert command.version == version, f"{turn} made with {command.version}, not {version}"
        truth = [true_token(turn, version, position) for position in range(total)]
        assert list(command.tokens) == truth, f"{turn}: tokens were lost, doubled or changed"
        self.completed += 1
        run.open_turns.discard(turn)
        self._fleet.phases.turn_ended(run)

    def give_up(self, turn: TurnId) -> None:
        """Nobody waits for it any more."""
        for book in (self.hidden, self._version, self._run_of):
            book.pop(turn, None)

    def _fail(self, turn: TurnId, error: str) -> None:
        """Asked again: a job's iteration needs all its responses."""
        assert "deadline" not in error, f"{turn} failed: {error}"
        if turn not in self._run_of:
            return
        self.failed += 1
        run, tokens = self._run_of[turn], self.hidden[turn]
        self.give_up(turn)
        run.open_turns.discard(turn)
        self.ask(run, turn.rsplit(".", 1)[0], tokens)

    # ---- engines ----
    def join(self, spec: InstanceSpec) -> None:
        """An engine comes up, empty."""
        fleet = self._fleet
        fleet.instances[spec.instance] = instance = StormInstance(spec, fleet.events)
        fleet.tell(on.InstanceJoined(fleet.now_s, spec))
        self._beat(instance)
        self._frame(instance)

    def _start(self, spec: InstanceSpec) -> None:
        up = spec.instance in self._fleet.instances
        if self._fleet.brain.steps.works(spec.instance) and not up:
            self.join(spec)

    def lives(self, instance: StormInstance) -> bool:
        return self._fleet.instances.get(instance.instance) is instance

    def _silent_s(self, instance: InstanceId) -> float:
        node: NodeId = self._fleet.node_of[instance]
        return self._fleet.silent(node)

    def _reach(self, instance: InstanceId, happen: "partial[None]", after_s: float = 0.0) -> None:
        """What is sent to an engine arrives when its node is heard again; to one that is gone, never."""
        there = self._fleet.instances.get(instance)

        def arrives() -> None:
            if there is not None and self.lives(there):
                happen()

        self._fleet.after(after_s + self._silent_s(instance), arrives)

    def _receive(self, command: do.Dispatch) -> None:
        if command.turn not in self.hidden:
            return  # it has been given up meanwhile
        instance = self._fleet.instances[command.instance]
        current = command.attempt in self._fleet.brain.rollout.books.dispatcher.attempts
        held = command.version in instance.versions
        assert held or not current, f"{command.turn} sent where {command.version} is not"
        request = StormRequest(command, self.hidden[command.turn], len(command.generated))
        instance.requests[command.attempt] = request

    def _forget(self, instance: InstanceId, attempt: int) -> None:
        self._fleet.instances[instance].requests.pop(attempt, None)

    def _pulled(self, instance: InstanceId, version: str) -> None:
        self._fleet.instances[instance].versions.add(version)
        self._fleet.tell(InstanceReady(self._fleet.now_s, instance, version))

    def _dropped(self, instance: InstanceId, version: str) -> None:
        place = self._fleet.instances[instance]
        used = [r for r in place.requests.values() if r.command.version == version]
        assert not used, f"{instance} drops {version} in use"
        place.versions.discard(version)

    def _released(self, instance: InstanceId, reason: str) -> None:
        """It ends; one that was given up, not drained, is replaced when its node is heard, as long as its phase goes on."""
        fleet = self._fleet
        fleet.instances.pop(instance, None)
        run = next((run for run in fleet.runs.values() if instance in run.engines), None)
        if run is None:
            return
        node = run.engines.pop(instance)
        if run.open_turns and reason != "drained":
            fleet.after(fleet.silent(node) + 1.0, partial(self._again, run, node, run.permit))

    def _again(self, run: JobRun, node: NodeId, permit: int | None) -> None:
        if permit is not None and run.permit == permit and run.open_turns:
            self._fleet.phases.bring_engine(run, node)

    def _beat(self, instance: StormInstance) -> None:
        fleet = self._fleet
        if not self.lives(instance):
            return
        if not self._silent_s(instance.instance):
            running = len(instance.requests)
            fleet.tell(
                on.InstanceHeartbeat(
                    *(fleet.now_s, instance.instance, running, 0),
                    *(instance.produced_tokens, instance.kv_used_tokens),
                )
            )
        fleet.after(BEAT_S, partial(self._beat, instance))

    def _frame(self, instance: StormInstance) -> None:
        """One token of every turn; so many frames fit into the job's worst rollout as a turn may have tokens."""
        fleet = self._fleet
        if not self.lives(instance):
            return
        assert instance.spec.job is not None
        run = fleet.runs[instance.spec.job]
        period_s = run.lengths.rollout_s / fleet.plan.max_tokens / fleet.pace()
        if not self._silent_s(instance.instance) and instance.requests:
            self._step(instance)
        fleet.after(period_s, partial(self._frame, instance))

    def _step(self, instance: StormInstance) -> None:
        fleet = self._fleet
        attempts, tokens = [], []
        for attempt, request in instance.requests.items():
            made = request.next_tokens(1)
            if made:
                attempts.append(attempt)
                tokens += made
        instance.produced_tokens += len(tokens)
        if attempts:
            scores = [-1.0] * len(tokens)
            name = instance.instance
            fleet.tell(on.TokensArrived(fleet.now_s, name, attempts, tokens, scores))
        for attempt, request in list(instance.requests.items()):
            if request.made_tokens >= request.total_tokens and self.lives(instance):
                instance.requests.pop(attempt, None)
                self._end(instance, request)

    def _end(self, instance: StormInstance, request: StormRequest) -> None:
        fleet, command = self._fleet, request.command
        most = fleet.plan.max_tokens
        reason = FinishReason.LENGTH if request.total_tokens >= most else FinishReason.STOP
        fleet.tell(
            on.TurnEnded(
                *(fleet.now_s, instance.instance, command.attempt),
                *(reason, request.made_tokens, command.version),
            )
        )
