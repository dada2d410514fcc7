"""A serving device: its engine on a page pool shared with a rollout's, profiled at start."""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

from slackwater.engine.config import EngineConfig
from slackwater.engine.coserving.executor import CoservingExecutor
from slackwater.engine.coserving.step_profile import measure_step_cost
from slackwater.engine.engine import Engine
from slackwater.engine.pages import PagePool
from slackwater.model.serving import ServingSlo
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.loading import load_net
from slackwater.policy.serving.arbiter import Arbiter
from slackwater.policy.serving.modes import mode_of
from slackwater.policy.serving.step_cost import StepCost
from slackwater.worker.engine_worker import grammar_guides, text_decoder
from slackwater.worker.files import NodeFiles
from slackwater.worker.loan import LentDevice
from slackwater.worker.process import address_of

_FEASIBLE_PROMPT = 64  # tokens that a service must be able to answer in time even alone


def feasible(cost: StepCost, slo: ServingSlo, step_tokens: int) -> str | None:
    """Why the service cannot meet its SLO even alone, or None."""
    step_s = cost.decode.at(1)
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


def engine_on(
    pool: PagePool, net: CausalLM, config: EngineConfig, model: Path, device: str
) -> Engine:
    """An engine whose cache is on a shared pool."""
    from slackwater.engine.executor import Executor

    executor: Executor
    if device.startswith("cuda"):
        from slackwater.engine.cuda.executor import CudaExecutor

        executor = CudaExecutor(net, config, pool)
    else:
        from slackwater.engine.cpu.executor import CpuExecutor

        executor = CpuExecutor(net.config, config, pool)
    guides = grammar_guides(model, net.config)
    return Engine(net, config, text_decoder(model), executor=executor, guides=guides)


def build(options: argparse.Namespace, files: NodeFiles) -> tuple[LentDevice, str | None]:
    """The service's engine on its pool, profiled; and why it must not lend, if it must not."""
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
    engine = engine_on(pool, net, config, model, options.device)
    cost = measure_step_cost(engine, net.config.vocab_size)
    why = feasible(cost, slo, config.max_step_tokens)
    arbiter = Arbiter(
        mode_of(options.mode),
        slo,
        cost,
        cost,
        capacity=pool.capacity,
        step_tokens=config.max_step_tokens,
    )
    executor = CoservingExecutor(engine, arbiter, time.perf_counter)

    def rollout_engine(weights: CausalLM, folder: Path, base_version: str) -> Engine:
        own = replace(config, base_version=base_version)
        return engine_on(pool, weights, own, folder, options.device)

    address = address_of(options.connect)
    device = LentDevice(executor, files, rollout_engine, options.worker, address, options.device)
    return device, why
