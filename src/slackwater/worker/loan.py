"""A rollout's stay on a serving device: its engine, and its own connection to the control plane."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slackwater.engine.coserving.executor import CoservingExecutor, CoservingStep
from slackwater.engine.coserving.staged_weights import StagedWeights
from slackwater.engine.coserving.step_profile import measure_step_cost
from slackwater.engine.engine import Engine
from slackwater.model.errors import RefusedError
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.loading import load_net
from slackwater.policy.serving.step_cost import StepCost
from slackwater.wire import lending, messages
from slackwater.worker.connection import Connection, DisconnectedError, HasFileno
from slackwater.worker.engine_worker import EngineWorker, heartbeat_gauges
from slackwater.worker.files import NodeFiles
from slackwater.worker.process import pin, secret
from slackwater.worker.weight_lane import WeightLane

logger = logging.getLogger(__name__)

_MAX_VERSIONS = 4
_ROOM_TO_BEGIN = 1 / 16  # of the pool; what a rollout needs beyond it, it asks for
_WARM_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_WARM_CONTEXTS = (200, 400, 900, 1900, 3900, 7900, 15900, 31900)


class RolloutFrontend(EngineWorker):
    """The rollout's turns."""

    def give_back(self, requests: Sequence[int], error: str) -> None:
        """Return evicted requests: they resume elsewhere with the tokens streamed so far."""
        frames = self._unsent()
        for request in requests:
            if self._requests.pop(request, None) is not None:
                self._made.drop(request)
                frames.append(messages.encode(messages.GenerateRefused(request, error, False)))
        if frames:
            self._connection.send(*frames)


class Loan:
    """From joining to leaving."""

    def __init__(
        self,
        connection: Connection,
        desk: RolloutFrontend,
        executor: CoservingExecutor,
        cold: list[tuple[int, int]],
    ) -> None:
        self._connection, self._desk, self._executor = connection, desk, executor
        self._told_lent = executor.arbiter.lent
        self._cold = cold

    @property
    def cold(self) -> bool:
        """Whether decode shapes are left that the device has not captured."""
        return bool(self._cold)

    def warm_one(self) -> None:
        """Prepare one of them; short, and yet too long for a service that has work."""
        rollout = self._executor.rollout
        rows, context = self._cold.pop()
        if rollout is not None:
            rollout.warm_decode([rows], [context])

    @property
    def wakers(self) -> tuple[HasFileno, ...]:
        """What may have something for the loop."""
        return (self._connection, self._desk.puller)

    def attend(self) -> bool:
        """Handle the control plane's messages; False if it released the instance."""
        try:
            for message in self._connection.receive(0.0):
                if isinstance(message, messages.Stop):
                    return False
                self._desk.do(message)
            self._desk.settle()
        except DisconnectedError:
            return False
        return True

    def tell(self, step: CoservingStep) -> None:
        """Send the rollout's tokens, evicted requests, and a changed budget."""
        if step.rolled_out is not None:
            self._desk.tell(step.rolled_out)
        else:
            self._desk.flush()
        if step.given_back:
            self._desk.give_back(step.given_back, "the service needs the memory")
        if self._executor.arbiter.lent != self._told_lent:
            self._tell_budget()

    def begin_step(self) -> None:
        """The job's next RL step: what the service left unused lately is lent."""
        self._executor.begin_rl_step()
        self._tell_budget()

    def end(self, given_back: Sequence[int]) -> None:
        """Return unfinished requests and disconnect."""
        try:
            self._desk.give_back(given_back, "the service took the device back")
        except DisconnectedError as error:
            logger.info("the loan's connection is gone: %s", error)
        self._desk.puller.close()
        self._connection.__exit__(None, None, None)

    def _tell_budget(self) -> None:
        self._told_lent = self._executor.arbiter.lent
        self._connection.send(messages.encode(self._budget()))

    def _budget(self) -> lending.BudgetReport:
        rollout = self._executor.rollout
        tokens = 0 if rollout is None else lent_tokens(self._executor, rollout)
        running = 0 if rollout is None or not tokens else rollout.config.max_running
        return lending.BudgetReport(running, tokens)

    def gauges(self) -> dict[str, float]:
        """The rollout's gauges, for the heartbeat's thread."""
        rollout = self._executor.rollout
        if rollout is None:
            return {}
        return {**heartbeat_gauges(rollout), "stalled": float(self._executor.stalled)}


def lent_tokens(executor: CoservingExecutor, rollout: Engine) -> int:
    """The number of rollout tokens that the budget holds."""
    blocks = executor.arbiter.lent * executor.service.config.page_bytes // rollout.block_bytes
    total = rollout.gauges()["kv_blocks_total"]
    return int(max(blocks - 1, 0) * rollout.capacity_tokens / max(total, 1.0))


def decode_shapes(rollout: Engine, lent: int) -> list[tuple[int, int]]:
    """Decode steps that a GPU captures, as rows and context, those wanted first last."""
    longest = min(rollout.max_context, lent)
    rows = [count for count in _WARM_ROWS if count <= rollout.config.max_running]
    contexts = [context for context in _WARM_CONTEXTS if context <= longest]
    return [(count, context) for context in reversed(contexts) for count in reversed(rows)]


class Activation:
    """Brings a rollout's weights to the host, then onto the device, beside the service's steps."""

    def __init__(self, wanted: lending.LendTo, stage: Callable[[], StagedWeights]) -> None:
        self.wanted = wanted
        self._stage = stage
        self._room = threading.Event()
        self._net: CausalLM | None = None
        self._error: Exception | None = None
        self.staged: StagedWeights | None = None
        self._thread = threading.Thread(target=self._work, name="activation", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def waits_for_room(self) -> bool:
        """Whether its weights are on the host, and nobody has said that they may go on."""
        return self.staged is not None and not self._room.is_set()

    def go_on(self, error: Exception | None = None) -> None:
        """There is room on the device, or there is none for this reason."""
        self._error = error
        self._room.set()

    def result(self) -> CausalLM:
        """The model; raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._net is not None
        return self._net

    def _work(self) -> None:
        try:
            self.staged = self._stage()
            self._room.wait()
            if self._error is None:
                self._net = self.staged.on_device()
        except Exception as error:  # noqa: BLE001  (the thread's edge: the loop decides what it means)
            self._error = error


@dataclass(slots=True)
class LentDevice:
    """What loans need of their worker; the first loan stages weights and measures steps."""

    executor: CoservingExecutor
    files: NodeFiles
    new_rollout: Callable[[CausalLM, Path, str], Engine]
    worker: str
    address: tuple[str, int]
    device: str
    loans: int = 0
    staged: dict[str, StagedWeights] = field(default_factory=dict)
    costs: dict[str, StepCost] = field(default_factory=dict)

    def warm_up_broker(self, model: str, base_version: str) -> None:
        """Stage a rollout's weights and measure its steps before the service has users.

        Otherwise the first loan waits for an idle moment, which a busy service does not have.
        """
        net = self._staged(model).on_device()
        rollout = self.new_rollout(net, self.files.model(model), base_version)
        try:
            self.costs[model] = measure_step_cost(rollout, net.config.vocab_size)
        finally:
            rollout.close()

    def activate(self, wanted: lending.LendTo) -> Activation:
        """Start loading a rollout's weights onto the device."""
        return Activation(wanted, lambda: self._staged(wanted.model))

    def may_join(self, activation: Activation) -> bool:
        """Its weights are loaded, and its steps are known or can be measured without delay."""
        if activation.waits_for_room:
            self._leave_room(activation)
        known = activation.wanted.model in self.costs
        return activation.done and (known or not self.executor.service.busy)

    def _leave_room(self, activation: Activation) -> None:
        """Take what the device lacks for the weights from the pool, if the service can spare it."""
        staged, pool = activation.staged, self.executor.service.arena.pool
        assert staged is not None
        try:
            self.executor.reserve_weight_pages(staged.lacking_bytes(pool.unclaimed_bytes))
        except RefusedError as error:
            activation.go_on(error)
        else:
            activation.go_on()

    def release_memory(self) -> None:
        """Let the pool have the memory of weights that are gone."""
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def lend(self, activation: Activation) -> Loan:
        """Join with the rollout. Raises if it does not fit or finds no room."""
        executor, wanted = self.executor, activation.wanted
        net = activation.result()
        known = wanted.model in self.costs
        executor.reclaim_service_share(
            _ROOM_TO_BEGIN if known else 1.0
        )  # the first time its steps are measured
        rollout = self.new_rollout(net, self.files.model(wanted.model), wanted.base_version)
        if not known:
            try:
                self.costs[wanted.model] = measure_step_cost(rollout, net.config.vocab_size)
            except BaseException:
                rollout.close()
                raise
        executor.arbiter.rollout_cost = self.costs[wanted.model]
        executor.lend(rollout)
        try:
            return self._joined(wanted, rollout)
        except BaseException:
            executor.take_back()
            raise

    def _joined(self, wanted: lending.LendTo, rollout: Engine) -> Loan:
        executor = self.executor
        tokens = lent_tokens(executor, rollout)
        if executor.arbiter.stopped:
            raise RefusedError("the service misses its SLO now")
        if tokens < 2:
            raise RefusedError("the service leaves no KV memory to lend; raise --kv-mb")
        self.loans += 1
        facts = messages.EngineFacts(
            base_model=wanted.base,
            max_running=rollout.config.max_running,
            max_context_tokens=min(rollout.max_context, tokens),
            kv_tokens=tokens,
            max_versions=_MAX_VERSIONS,
            kind="borrowed",
            job=wanted.job,
        )
        hello = messages.Hello(f"{self.worker}~{self.loans}", "engine", facts)
        connection = Connection(self.address, hello, secret(), pin=pin(), orphaned=_only_the_loan)
        lane = WeightLane(self.files.weights())
        desk = RolloutFrontend(connection, rollout, lane, add=executor.roll_out)
        cold = decode_shapes(rollout, tokens) if self.device.startswith("cuda") else []
        loan = Loan(connection, desk, executor, cold)
        connection.report_gauges(loan.gauges)
        connection.__enter__()
        return loan

    def _staged(self, model: str) -> StagedWeights:
        """A model in host memory, loaded on first use by the activation's thread."""
        if model not in self.staged:
            self.staged.clear()  # one rollout model at a time: host memory is bounded
            dtype = torch.bfloat16 if self.device.startswith("cuda") else torch.float32
            net = load_net(self.files.model(model), dtype=dtype)
            self.staged[model] = StagedWeights.from_net(net, self.device)
        return self.staged[model]


def _only_the_loan() -> None:
    """A lost loan must not end the process: the service's own connection decides that."""
