"""The loan of a serving device to a rollout: its engine and its own connection."""

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
from slackwater.worker.puller import WeightLane

logger = logging.getLogger(__name__)

_MAX_VERSIONS = 4
_INITIAL_POOL_SHARE = 1 / 16  # of the pool; a rollout requests more as it needs it
_CAPTURED_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_CAPTURED_CONTEXTS = (200, 400, 900, 1900, 3900, 7900, 15900, 31900)


class RolloutFrontend(EngineWorker):
    """The rollout's side of the worker: its turns and versions."""

    def refuse_evicted(self, requests: Sequence[int], error: str) -> None:
        """Return evicted requests: they resume elsewhere with the tokens streamed so far."""
        frames = self._encode_unsent()
        for request in requests:
            if self._requests.pop(request, None) is not None:
                self._history.drop(request)
                frames.append(messages.encode(messages.GenerateRefused(request, error, False)))
        if frames:
            self._connection.send(*frames)


class Loan:
    """A running loan, from its connection to its end."""

    def __init__(
        self,
        connection: Connection,
        frontend: RolloutFrontend,
        executor: CoservingExecutor,
        uncaptured_shapes: list[tuple[int, int]],
    ) -> None:
        self._connection, self._frontend, self._executor = connection, frontend, executor
        self._reported_lent = executor.arbiter.lent
        self._uncaptured = uncaptured_shapes

    @property
    def has_uncaptured_shapes(self) -> bool:
        """Whether the device has decode shapes left to capture."""
        return bool(self._uncaptured)

    def capture_shape(self) -> None:
        """Capture one decode shape; short, but too long while the service has work."""
        rollout = self._executor.rollout
        rows, context = self._uncaptured.pop()
        if rollout is not None:
            rollout.warm_decode([rows], [context])

    @property
    def wakers(self) -> tuple[HasFileno, ...]:
        return (self._connection, self._frontend.puller)

    def handle_messages(self) -> bool:
        """Handle the control plane's messages; False if it released the instance."""
        try:
            for message in self._connection.receive(0.0):
                if isinstance(message, messages.Stop):
                    return False
                self._frontend.handle_message(message)
            self._frontend.report_versions()
        except DisconnectedError:
            return False
        return True

    def send_results(self, step: CoservingStep) -> None:
        """Send the rollout's tokens, evicted requests, and a changed budget."""
        if step.rolled_out is not None:
            self._frontend.send_results(step.rolled_out)
        else:
            self._frontend.send_waiting_tokens()
        if step.given_back:
            self._frontend.refuse_evicted(step.given_back, "the service needs the memory")
        if self._executor.arbiter.lent != self._reported_lent:
            self._report_budget()

    def begin_step(self) -> None:
        """At the job's next RL step: lend what the service left unused recently."""
        self._executor.begin_rl_step()
        self._report_budget()

    def close(self, evicted: Sequence[int]) -> None:
        """Return unfinished requests and disconnect."""
        try:
            self._frontend.refuse_evicted(evicted, "the service took the device back")
        except DisconnectedError as error:
            logger.info("the loan's connection is gone: %s", error)
        self._frontend.puller.close()
        self._connection.__exit__(None, None, None)

    def _report_budget(self) -> None:
        self._reported_lent = self._executor.arbiter.lent
        self._connection.send(messages.encode(self._budget()))

    def _budget(self) -> lending.BudgetReport:
        rollout = self._executor.rollout
        tokens = 0 if rollout is None else count_lent_tokens(self._executor, rollout)
        running = 0 if rollout is None or not tokens else rollout.config.max_running
        return lending.BudgetReport(running, tokens)

    def gauges(self) -> dict[str, float]:
        """The rollout's gauges, for the heartbeat's thread."""
        rollout = self._executor.rollout
        if rollout is None:
            return {}
        return {**heartbeat_gauges(rollout), "stalled": float(self._executor.stalled)}


def count_lent_tokens(executor: CoservingExecutor, rollout: Engine) -> int:
    """The number of rollout tokens that the budget holds."""
    blocks = executor.arbiter.lent * executor.service.config.page_bytes // rollout.block_bytes
    total = rollout.gauges()["kv_blocks_total"]
    return int(max(blocks - 1, 0) * rollout.capacity_tokens / max(total, 1.0))


def decode_shapes(rollout: Engine, lent: int) -> list[tuple[int, int]]:
    """Decode steps for a GPU to capture, as rows and context; the most urgent is last."""
    longest = min(rollout.max_context, lent)
    rows = [count for count in _CAPTURED_ROWS if count <= rollout.config.max_running]
    contexts = [context for context in _CAPTURED_CONTEXTS if context <= longest]
    return [(count, context) for context in reversed(contexts) for count in reversed(rows)]


class Activation:
    """Loads a rollout's weights to the host, then to the device, while the service runs steps."""

    def __init__(self, order: lending.LendNode, stage: Callable[[], StagedWeights]) -> None:
        self.order = order
        self._stage = stage
        self._memory_granted = threading.Event()
        self._net: CausalLM | None = None
        self._error: Exception | None = None
        self.staged: StagedWeights | None = None
        self._thread = threading.Thread(target=self._work, name="activation", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def waits_for_memory(self) -> bool:
        """Whether its weights are on the host and wait for `grant_memory`."""
        return self.staged is not None and not self._memory_granted.is_set()

    def grant_memory(self, error: Exception | None = None) -> None:
        """Let the weights load to the device, or fail with this error."""
        self._error = error
        self._memory_granted.set()

    def result(self) -> CausalLM:
        """The model; raises the thread's error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._net is not None
        return self._net

    def _work(self) -> None:
        try:
            self.staged = self._stage()
            self._memory_granted.wait()
            if self._error is None:
                self._net = self.staged.on_device()
        except Exception as error:  # noqa: BLE001  (the thread's edge: the loop decides what it means)
            self._error = error


@dataclass(slots=True)
class LentDevice:
    """A worker's device, as loans use it; the first loan stages weights and measures steps."""

    executor: CoservingExecutor
    files: NodeFiles
    new_rollout: Callable[[CausalLM, Path, str], Engine]
    worker: str
    address: tuple[str, int]
    device: str
    loans: int = 0
    staged: dict[str, StagedWeights] = field(default_factory=dict)
    costs: dict[str, StepCost] = field(default_factory=dict)

    def warm_up_rollout(self, model: str, base_version: str) -> None:
        """Stage a rollout's weights and measure its steps before the service has users.

        Otherwise the first loan waits for an idle moment, which a busy service does not have.
        """
        net = self._stage_model(model).on_device()
        rollout = self.new_rollout(net, self.files.model(model), base_version)
        try:
            self.costs[model] = measure_step_cost(rollout, net.config.vocab_size)
        finally:
            rollout.close()

    def activate(self, order: lending.LendNode) -> Activation:
        """Start loading a rollout's weights onto the device."""
        return Activation(order, lambda: self._stage_model(order.model))

    def may_join(self, activation: Activation) -> bool:
        """Its weights are loaded, and its steps are known or can be measured without delay."""
        if activation.waits_for_memory:
            self._request_memory(activation)
        is_measured = activation.order.model in self.costs
        return activation.done and (is_measured or not self.executor.service.busy)

    def _request_memory(self, activation: Activation) -> None:
        """Free device memory for the weights from the pool, if the service can spare it."""
        staged, pool = activation.staged, self.executor.service.arena.pool
        assert staged is not None
        try:
            self.executor.reserve_weight_pages(staged.lacking_bytes(pool.unclaimed_bytes))
        except RefusedError as error:
            activation.grant_memory(error)
        else:
            activation.grant_memory()

    def release_memory(self) -> None:
        """Return the memory of dropped weights to the pool."""
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def lend(self, activation: Activation) -> Loan:
        """Start the rollout on this device; raises if it does not fit or memory is short."""
        executor, order = self.executor, activation.order
        net = activation.result()
        is_measured = order.model in self.costs
        # The first rollout of a model gets the whole pool, to measure its steps.
        executor.reclaim_service_share(_INITIAL_POOL_SHARE if is_measured else 1.0)
        rollout = self.new_rollout(net, self.files.model(order.model), order.base_version)
        if not is_measured:
            try:
                self.costs[order.model] = measure_step_cost(rollout, net.config.vocab_size)
            except BaseException:
                rollout.close()
                raise
        executor.arbiter.rollout_cost = self.costs[order.model]
        executor.lend(rollout)
        try:
            return self._connect(order, rollout)
        except BaseException:
            executor.take_back()
            raise

    def _connect(self, order: lending.LendNode, rollout: Engine) -> Loan:
        executor = self.executor
        tokens = count_lent_tokens(executor, rollout)
        if executor.arbiter.stopped:
            raise RefusedError("the service misses its SLO now")
        if tokens < 2:
            raise RefusedError("the service leaves no KV memory to lend; raise --kv-mb")
        self.loans += 1
        facts = messages.EngineFacts(
            base_model=order.base,
            max_running=rollout.config.max_running,
            max_context_tokens=min(rollout.max_context, tokens),
            kv_tokens=tokens,
            max_versions=_MAX_VERSIONS,
            kind="borrowed",
            job=order.job,
        )
        hello = messages.Hello(lending.loan_name(self.worker, self.loans), "engine", facts)
        connection = Connection(
            self.address, hello, secret(), pin=pin(), on_orphaned=_ignore_lost_loan
        )
        lane = WeightLane(self.files.weights())
        frontend = RolloutFrontend(connection, rollout, lane, add=executor.roll_out)
        uncaptured_shapes = decode_shapes(rollout, tokens) if self.device.startswith("cuda") else []
        loan = Loan(connection, frontend, executor, uncaptured_shapes)
        connection.report_gauges(loan.gauges)
        connection.__enter__()
        return loan

    def _stage_model(self, model: str) -> StagedWeights:
        """A model in host memory, loaded on first use by the activation's thread."""
        if model not in self.staged:
            self.staged.clear()  # one rollout model at a time: host memory is bounded
            dtype = torch.bfloat16 if self.device.startswith("cuda") else torch.float32
            net = load_net(self.files.model(model), dtype=dtype)
            self.staged[model] = StagedWeights.from_net(net, self.device)
        return self.staged[model]


def _ignore_lost_loan() -> None:
    """A lost loan must not end the process: the service's own connection decides that."""
