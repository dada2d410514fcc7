"""The co-serving process: a serving engine, and a rollout engine while the device is lent.

To the control plane it is one or two ordinary instances: the service's connection is permanent, the
rollout's lasts as long as the loan.
"""

import argparse
import logging
import time
from dataclasses import replace
from pathlib import Path

import torch

from slackwater.engine.config import EngineConfig
from slackwater.engine.coserving.executor import CoservingExecutor, CoservingStep, RequestLatency
from slackwater.engine.coserving.step_profile import measure_step_cost
from slackwater.engine.engine import Engine, default_executor
from slackwater.engine.pages import PagePool
from slackwater.model.errors import RefusedError, SlackwaterError
from slackwater.model.serving import ServingSlo
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.loading import load_net
from slackwater.policy.serving.arbiter import Arbiter
from slackwater.policy.serving.modes import find_mode
from slackwater.policy.serving.step_cost import StepCost
from slackwater.wire import lending, messages
from slackwater.worker.connection import Connection, DisconnectedError, HasFileno
from slackwater.worker.engine_worker import EngineWorker, heartbeat_gauges, text_engine
from slackwater.worker.files import NodeFiles, node_files
from slackwater.worker.loan import Activation, LentDevice, Loan
from slackwater.worker.process import address_of, dial, engine_parser, pin, run_worker, secret
from slackwater.worker.puller import WeightLane

logger = logging.getLogger(__name__)
_IDLE_PAUSE_S = 0.002  # pause when there is work but the budget allows no step
_ACTIVATION_POLL_S = 0.02

_FEASIBLE_PROMPT = 64  # tokens; a service alone must prefill these in time


def find_slo_fault(cost: StepCost, slo: ServingSlo, step_tokens: int) -> str | None:
    """Why the service cannot meet its SLO even alone, or None."""
    step_s = cost.decode.step_s(1)
    prompt_s = cost.prompt_s(_FEASIBLE_PROMPT, 0, step_tokens)
    if step_s > slo.tpot_s:
        return (
            f"slo: tpot {slo.tpot_s:g} s is less than one decode step takes here ({step_s:.3g} s)"
        )
    if prompt_s > slo.ttft_s:
        return (
            f"slo: ttft {slo.ttft_s:g} s is less than a prompt of {_FEASIBLE_PROMPT} tokens takes"
            f" here ({prompt_s:.3g} s)"
        )
    return None


def _pool(device: str, kv_mb: int, page_kb: int) -> tuple[PagePool, int]:
    if device.startswith("cuda"):
        from slackwater.engine.cuda.pages import CudaPagePool

        page_bytes = 16 << 20  # mapping a page costs the same for all sizes
        return CudaPagePool(kv_mb << 20, page_bytes, torch.device(device)), page_bytes
    from slackwater.engine.pages import HostPagePool

    return HostPagePool(kv_mb << 20, page_kb << 10), page_kb << 10


def build(options: argparse.Namespace, files: NodeFiles) -> tuple[LentDevice, str | None]:
    """The service's engine on its pool, profiled; and the reason if it must not lend."""
    slo = ServingSlo.parse(options.slo)
    on_gpu = options.device.startswith("cuda")
    pool, page_bytes = _pool(options.device, options.kv_mb, options.page_kb)
    config = EngineConfig(
        kv_bytes=options.kv_mb << 20,
        page_bytes=page_bytes,
        max_running=options.max_running,
        max_step_tokens=2048 if on_gpu else 256,
        max_full_versions=8,
        base_version=options.base_version,
        steps_ahead=False,
    )
    model = files.model(options.model)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    net = load_net(model, dtype=dtype, device=options.device)
    engine = text_engine(model, net, config, default_executor(net, config, pool))
    cost = measure_step_cost(engine, net.config.vocab_size)
    fault = find_slo_fault(cost, slo, config.max_step_tokens)
    arbiter = Arbiter(
        find_mode(options.mode),
        slo,
        cost,
        cost,
        capacity=pool.capacity,
        step_tokens=config.max_step_tokens,
    )
    executor = CoservingExecutor(engine, arbiter, time.perf_counter)

    def rollout_engine(weights: CausalLM, folder: Path, base_version: str) -> Engine:
        rollout_config = replace(config, base_version=base_version)
        return text_engine(
            folder, weights, rollout_config, default_executor(weights, rollout_config, pool)
        )

    address = address_of(options.connect)
    device = LentDevice(executor, files, rollout_engine, options.worker, address, options.device)
    return device, fault


class SloCounter:
    """Requests and SLO hits since the start; the control plane derives rates per minute."""

    def __init__(self, slo: ServingSlo) -> None:
        self._slo = slo
        self._requests = self._met = 0

    def count(self, times: RequestLatency) -> None:
        self._requests += 1
        self._met += self._slo.is_met(times.ttft_s, times.tpot_s)

    def gauges(self) -> dict[str, float]:
        return {"slo_requests": float(self._requests), "slo_met": float(self._met)}


class CoservingWorker:
    """One loop over both connections and the executor."""

    def __init__(
        self, connection: Connection, frontend: EngineWorker, device: LentDevice, counts: SloCounter
    ) -> None:
        self._connection, self._frontend, self._device = connection, frontend, device
        self._executor, self._counts = device.executor, counts
        self.loan: Loan | None = None
        self._activation: Activation | None = None

    def run(self) -> None:
        executor = self._executor
        idle = False
        while True:
            for message in self._connection.receive(self._wait_s(idle), *self._wakers()):
                if isinstance(message, messages.Stop):
                    self._end_loan("")
                    return
                self._handle_message(message)
            self._frontend.report_versions()
            if self._activation is not None and self._device.may_join(self._activation):
                self._join(self._activation)
            if self.loan is not None and not self.loan.handle_messages():
                self._end_loan("the control plane released the instance")
            if (
                self.loan is not None
                and self.loan.has_uncaptured_shapes
                and not executor.service.busy
            ):
                self.loan.capture_shape()
            idle = False
            if executor.busy:
                idle = self._send_results(executor.step())

    def _handle_message(self, message: messages.ToWorker) -> None:
        match message:
            case lending.LendNode():
                self._lend(message)
            case lending.BeginStep():
                if self.loan is not None:
                    self.loan.begin_step()
            case lending.ReclaimNode():
                self._end_loan("", answer=True)
            case _:
                self._frontend.handle_message(message)

    def _wait_s(self, idle: bool) -> float | None:
        if self._executor.busy:
            return _IDLE_PAUSE_S if idle else 0.0
        if self.loan is not None and self.loan.has_uncaptured_shapes:
            return 0.0
        return None if self._activation is None else _ACTIVATION_POLL_S

    def _wakers(self) -> tuple[HasFileno, ...]:
        loan = () if self.loan is None else self.loan.wakers
        return (self._frontend.puller, *loan)

    def _lend(self, message: lending.LendNode) -> None:
        if self.loan is None and self._activation is None:
            self._activation = self._device.activate(message)

    def _join(self, activation: Activation) -> None:
        """Start the loan; a failure is reported and the service continues."""
        self._activation = None
        try:
            self.loan = self._device.lend(activation)
        except (SlackwaterError, OSError) as error:
            logger.warning("not lent: %s", error)
            self._executor.take_back()
            self._device.release_memory()
            self._connection.send(messages.encode(lending.LoanEnded(str(error))))

    def _end_loan(self, error: str, *, answer: bool = False) -> None:
        loan, self.loan = self.loan, None
        if self._activation is not None:
            self._activation.grant_memory(RefusedError("the service took the device back"))
        self._activation = None
        evicted = self._executor.take_back()
        if loan is not None:
            loan.close(evicted)
        del loan
        self._device.release_memory()
        if error or answer:
            self._connection.send(messages.encode(lending.LoanEnded(error)))

    def _send_results(self, step: CoservingStep) -> bool:
        """Send a step's results; whether neither side could run."""
        for times in step.ended:
            self._counts.count(times)
        if step.served is not None:
            self._frontend.send_results(step.served)
        else:
            self._frontend.send_waiting_tokens()
        if self.loan is not None:
            try:
                self.loan.send_results(step)
            except DisconnectedError:
                self._end_loan("the control plane released the instance")
        return step.served is None and step.rolled_out is None

    def gauges(self) -> dict[str, float]:
        """The service's gauges, for the heartbeat's thread."""
        executor = self._executor
        return {
            **heartbeat_gauges(executor.service),
            **self._counts.gauges(),
            "lent": float(self.loan is not None),
            "kv_share": executor.arbiter.kv_share(executor.serving_pages),
            "needed_s": executor.needed_s,
            "rollout_s": executor.rollout_s,
            "budget_cuts": float(executor.cuts),
            "promise_kept": float(executor.keeps_slo()),
        }


def _options() -> argparse.Namespace:
    parser = engine_parser("A co-serving worker; `slackwater up --serve` starts it.")
    parser.add_argument("--kv-mb", type=int, default=512, help="KV memory of both models together")
    parser.add_argument("--page-kb", type=int, default=2048, help="a page of it, on a CPU")
    parser.add_argument("--slo", required=True, help="such as ttft=0.5,tpot=0.15")
    parser.add_argument("--mode", default="foresight")
    parser.add_argument("--lend", action="store_true", help="take rollouts in when told to")
    parser.add_argument(
        "--borrower",
        nargs=2,
        action="append",
        default=[],
        metavar=("MODEL", "VERSION"),
        help="URI of a model that may roll out here, and its base version; staged and measured "
        "at the start",
    )
    options: argparse.Namespace = parser.parse_args()
    return options


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    files = node_files(options.files, secret(), pin())
    device, fault = build(options, files)
    engine, slo = device.executor.service, device.executor.arbiter.slo
    if fault is not None:
        logger.error("%s; it serves, and lends nothing", fault)
    elif options.lend:
        for model, version in options.borrower:
            try:
                device.warm_up_rollout(model, version)
            except (SlackwaterError, OSError, torch.OutOfMemoryError) as error:
                # A rollout that does not fit is refused when it is ordered.
                logger.warning("%s could not be warmed up: %s", model, error)
    facts = messages.EngineFacts(
        base_model=options.base,
        max_running=options.max_running,
        max_context_tokens=engine.max_context,
        kv_tokens=engine.capacity_tokens,
        max_versions=4,
        lends=options.lend and fault is None,
    )
    hello = messages.Hello(options.worker, "engine", facts)
    with dial(options.connect, hello) as connection:
        if options.lend and fault is not None:
            connection.send(messages.encode(lending.LoanEnded(fault)))
        serve, abort = device.executor.serve, device.executor.abort_served
        lane = WeightLane(files.weights())
        frontend = EngineWorker(connection, engine, lane, add=serve, abort=abort)
        worker = CoservingWorker(connection, frontend, device, SloCounter(slo))
        connection.report_gauges(worker.gauges)
        worker.run()


if __name__ == "__main__":
    run_worker(main)
