"""A real vLLM server as an instance. Name its program in SLACKWATER_VLLM (`make test-vllm` sets it
up).
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
import psutil
import pytest

from harness.live_fleet import BASE, BASE_VERSION
from harness.preloaded_programs import AwaitedProgram
from harness.rollout_floor import RolloutFloor
from harness.server_bench import PROMPT, ServerBench, turn, until
from slackwater.control.rollout.commands import CompleteTurn
from slackwater.control.rollout.manager_state import ManagerState
from slackwater.model.errors import UnavailableError
from slackwater.model.ids import InstanceId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import FinishReason
from slackwater.worker.engine_server.vllm import VllmServer
from slackwater.zoo.tiny import make_model

VLLM = os.environ.get("SLACKWATER_VLLM")
pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        VLLM is None,
        reason="no vLLM: set SLACKWATER_VLLM to its program, or run `make test-vllm`",
    ),
]
UPDATES = 10
TURNS_EACH = 4


def model_logprobs(
    model: Path, prompt: Sequence[int], tokens: Sequence[int], temperature: float
) -> list[float]:
    """What the sampled tokens' log-probs must be: an independent forward of the same weights."""
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = net(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    scores = torch.log_softmax(logits / temperature, -1)
    found: list[float] = scores[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
    return found


async def scored(
    model: Path, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """The same beside the event loop, which must go on hearing its workers."""
    return await asyncio.to_thread(model_logprobs, model, prompt, tokens, temperature)


def test_a_vllm_server_is_an_instance(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(1150), RolloutFloor() as floor:
            bench = ServerBench(floor, tmp_path)
            try:
                await run_all(bench)
            finally:
                await bench.stop()

    make_model("tiny", tmp_path / "model", seed=0)
    model_logprobs(tmp_path / "model", PROMPT, [1], 1.0)  # imports, before anything waits for us
    asyncio.run(scenario())


async def run_all(bench: ServerBench) -> None:
    server = ["--engine", "vllm", "--program", str(VLLM)]
    server += ["--server-options", "--enforce-eager --max-model-len 512"]
    adapter = await bench.start("v", "engine_server.adapter", *server)
    joined = asyncio.create_task(bench.floor.until_joined(1))
    ended = asyncio.create_task(adapter.wait())
    await asyncio.wait({joined, ended}, return_when=asyncio.FIRST_COMPLETED)
    assert joined.done(), (bench.folder / "v.log").read_text()[-3000:]
    bench.floor.rollout.publish(BASE_VERSION, BASE)
    process = psutil.Process(adapter.pid).children()[0]

    says_what_it_cannot_do(bench)
    await tokens_and_logprobs_are_the_models(bench)
    await asked_extras_come(bench)
    await versions_are_never_mixed(bench)
    await every_version_is_the_one_published(bench)
    await adapters_are_updated_under_load(bench, process)
    await a_prompt_over_the_context_fails_alone(bench)
    await a_cancelled_turn_leaves_the_server(bench)
    await turns_go_on_elsewhere_when_the_adapter_is_killed(bench, adapter)
    _, alive = await asyncio.to_thread(psutil.wait_procs, [process], 30)
    assert not alive, "the server outlived its adapter"


def says_what_it_cannot_do(bench: ServerBench) -> None:
    spec = bench.floor.manager.state.instances.records[InstanceId("v")].spec
    assert not spec.exact_continuation
    assert spec.max_context_tokens == 512
    assert spec.kv_tokens > 512


async def tokens_and_logprobs_are_the_models(bench: ServerBench) -> None:
    turns = [
        turn(f"t{seed}", Sampling(24, temperature=temperature, seed=seed))
        for seed, temperature in enumerate((1.0, 1.0, 1.0, 0.7, 0.7, 0.7))
    ]
    results = await asyncio.gather(*(bench.floor.generate(spec) for spec in turns))
    assert len({tuple(result.tokens) for result in results}) == len(turns)
    for spec, result in zip(turns, results, strict=True):
        assert result.reason is FinishReason.LENGTH
        wanted = await scored(bench.model, PROMPT, result.tokens, spec.sampling.temperature)
        assert list(result.logprobs) == pytest.approx(wanted, abs=2e-3)


async def asked_extras_come(bench: ServerBench) -> None:
    asked = Sampling(8, seed=5, topk_logprobs=3, prompt_logprobs=True, topk_prompt_logprobs=2)
    result = await bench.floor.generate(turn("extras", asked))
    assert [len(row) for row in result.topk] == [3] * 8
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    wanted = await scored(bench.model, PROMPT[:1], PROMPT[1:])
    assert list(result.prompt_logprobs[1:]) == pytest.approx(wanted, abs=2e-3)
    assert [None if row is None else len(row) for row in result.prompt_topk] == [None, 2, 2, 2, 2]
    stop = result.tokens[3]
    stopped = await bench.floor.generate(
        turn("stopped", Sampling(8, seed=5, stop_token_ids=(stop,)))
    )
    assert stopped.reason is FinishReason.STOP
    assert list(stopped.tokens) == list(result.tokens)[: list(result.tokens).index(stop) + 1]


async def versions_are_never_mixed(bench: ServerBench) -> None:
    other = bench.publish_other("v2")
    turns = [
        turn(f"mixed-{n}", Sampling(16, seed=n), version=BASE_VERSION if n % 2 else "v2")
        for n in range(6)
    ]
    results = await asyncio.gather(*(bench.floor.generate(spec) for spec in turns))
    for spec, result in zip(turns, results, strict=True):
        model = bench.model if spec.version == BASE_VERSION else other
        wanted = await scored(model, PROMPT, result.tokens)
        assert result.version == spec.version
        assert list(result.logprobs) == pytest.approx(wanted, abs=2e-3)


async def every_version_is_the_one_published(bench: ServerBench) -> None:
    """The server holds two whole versions, so files of dropped ones are written over."""
    for seed in range(4):
        version = f"whole-{seed}"
        other = bench.publish_other(version, seed)
        spec = turn(version, Sampling(8, seed=seed), version=version)
        result = await bench.floor.generate(spec)
        wanted = await scored(other, PROMPT, result.tokens)
        assert list(result.logprobs) == pytest.approx(wanted, abs=2e-3)


def server_url(server: psutil.Process) -> str:
    line = server.cmdline()
    return f"http://127.0.0.1:{line[line.index('--port') + 1]}"


async def adapters_are_updated_under_load(bench: ServerBench, server: psutil.Process) -> None:
    """Two adapters, each updated five times while turns of all versions run."""
    versions = [f"job-{job}-step-{step}" for step in range(UPDATES // 2) for job in range(2)]
    folders = {name: bench.publish_adapter(name, seed) for seed, name in enumerate(versions)}
    running: list[asyncio.Task[CompleteTurn]] = []
    on_base = [turn(f"base-{n}", Sampling(40, seed=n)) for n in range(UPDATES)]
    alone_on_base = [await bench.floor.generate(spec) for spec in on_base]
    for number, version in enumerate(versions):
        line = version.partition("-step")[0]
        bench.floor.rollout.publish(version, BASE, line=line, adapter=True)
        for n in range(TURNS_EACH):
            spec = turn(f"{version}-{n}", Sampling(40, seed=n), version=version)
            running.append(asyncio.create_task(bench.floor.generate(spec)))
        base = replace(on_base[number], turn=TurnId(f"beside-{number}"))
        running.append(asyncio.create_task(bench.floor.generate(base)))
        await until(lambda due=number: sum(t.done() for t in running) >= due)  # type: ignore[misc]
    results = await asyncio.gather(*running)
    log = (bench.folder / "v.log").read_text()
    assert "adapter merged into the base" not in log
    async with aiohttp.ClientSession() as session:
        api = VllmServer(session, server_url(server))
        await api.read_capabilities()
        for version in versions:
            await api.load_adapter(f"alone-{version}", folders[version])
        for result in results:
            version, _, seed = str(result.turn).rpartition("-")
            if version == "beside":
                assert result.version == BASE_VERSION
                assert result.tokens == alone_on_base[int(seed)].tokens
                continue
            assert result.version == version
            alone: list[int] = []
            adapter = f"alone-{version}"
            sampling = Sampling(40, seed=int(seed))
            name = f"alone-{result.turn}"
            async for part in api.stream(name, [*PROMPT], sampling, 0, adapter=adapter):
                alone += part.tokens
            assert list(result.tokens) == alone, (result.turn, result.version, result.moves)
    assert len({tuple(result.tokens) for result in results}) > UPDATES
    wanted = await scored(bench.model, PROMPT, alone_on_base[0].tokens)
    assert list(alone_on_base[0].logprobs) == pytest.approx(wanted, abs=2e-3)


async def a_prompt_over_the_context_fails_alone(bench: ServerBench) -> None:
    long, short = turn("long", Sampling(4), (7,) * 600), turn("short", Sampling(4))
    answers = await asyncio.gather(
        bench.floor.generate(long), bench.floor.generate(short), return_exceptions=True
    )
    assert isinstance(answers[0], UnavailableError)
    assert not isinstance(answers[1], BaseException)
    assert len(answers[1].tokens) == 4
    foreign = turn("foreign", Sampling(4), (1, 999_999))
    with pytest.raises(UnavailableError, match="vocabulary"):
        await bench.floor.generate(foreign)


async def a_cancelled_turn_leaves_the_server(bench: ServerBench) -> None:
    record = bench.floor.manager.state.instances.records[InstanceId("v")]
    running = asyncio.create_task(bench.floor.generate(turn("endless", Sampling(500, seed=1))))
    live = bench.floor.manager.state.turns
    async with asyncio.timeout(30):
        await until(lambda: TurnId("endless") in live and len(live[TurnId("endless")].tokens) > 0)
        bench.floor.rollout.cancel(TurnId("endless"))
        await until(lambda: record.reported_running == 0)
    running.cancel()


def fewest_tokens(books: ManagerState) -> int:
    return min((len(turn.tokens) for turn in books.turns.values()), default=0)


async def turns_go_on_elsewhere_when_the_adapter_is_killed(
    bench: ServerBench, adapter: AwaitedProgram
) -> None:
    await bench.start("own", "engine_worker", "--kv-mb", "32")
    await bench.floor.until_joined(2)
    books = bench.floor.manager.state
    bench.floor.rollout.drain(InstanceId("own"), move_turns=True)  # so that all begin on the server
    turns = [turn(f"moved-{n}", Sampling(300, seed=n)) for n in range(4)]
    tasks = [asyncio.create_task(bench.floor.generate(spec)) for spec in turns]
    async with asyncio.timeout(300):
        await until(lambda: fewest_tokens(books) >= 5)
        kept = {name: list(t.tokens) for name, t in books.turns.items()}
        adapter.kill()
        await bench.start("own-2", "engine_worker", "--kv-mb", "32")
        results = await asyncio.gather(*tasks)
    for spec, result in zip(turns, results, strict=True):
        assert len(result.tokens) == 300
        assert list(result.tokens)[: len(kept[spec.turn])] == kept[spec.turn]
        assert result.moves >= 1
        wanted = await scored(bench.model, PROMPT, result.tokens)
        assert list(result.logprobs) == pytest.approx(wanted, abs=2e-3)
