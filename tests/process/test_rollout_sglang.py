"""An SGLang server as an instance, against the recorded contract of `harness/sglang_server.py`."""

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from harness.live_fleet import BASE, BASE_VERSION
from harness.ports import free_port
from harness.rollout_floor import RolloutFloor
from harness.server_bench import PROMPT, ServerBench, turn, until
from harness.sglang_server import SglangContract, continued, fingerprint, logprob_of
from slackwater.control.rollout.commands import CompleteTurn
from slackwater.model.errors import ConfigError, RefusedError, UnavailableError
from slackwater.model.ids import InstanceId, TurnId
from slackwater.model.sampling import Grammar, Sampling
from slackwater.model.turn import FinishReason
from slackwater.worker.engine_server.sglang import SglangServer
from slackwater.zoo.tiny import make_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
UPDATES = 10
DEADLINE_S = 240
UPDATE_ORDER = ["pause abort", "begin", "update", "end", "continue"]


class SglangBench(ServerBench):
    """The same with a server, and what its tokens must be."""

    def __init__(self, floor: RolloutFloor, folder: Path, server: SglangContract) -> None:
        super().__init__(floor, folder)
        self.server = server
        self.base = ""

    def expected(self, seed: int, count: int, weights: str = "", adapter: str = "") -> list[int]:
        return continued(weights or self.base, adapter, seed, PROMPT, count)


def test_an_sglang_server_is_an_instance(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = SglangContract(tmp_path / "model")
        async with (
            asyncio.timeout(DEADLINE_S),
            RolloutFloor() as floor,
            server.serving(free_port()),
        ):
            bench = SglangBench(floor, tmp_path, server)
            try:
                await run_all(bench)
            finally:
                await bench.stop()

    make_model("tiny", tmp_path / "model", seed=0)
    asyncio.run(scenario())


async def run_all(bench: SglangBench) -> None:
    options = ("--engine", "sglang", "--url", bench.server.url)
    adapter = await bench.start("s", "engine_server.adapter", *options)
    joined = asyncio.create_task(bench.floor.until_joined(1))
    ended = asyncio.create_task(adapter.wait())
    await asyncio.wait({joined, ended}, return_when=asyncio.FIRST_COMPLETED)
    assert joined.done(), (bench.folder / "s.log").read_text()[-3000:]
    bench.floor.rollout.publish(BASE_VERSION, BASE)
    bench.base = bench.server.weights
    assert bench.server.weight_version == BASE_VERSION

    await tokens_and_extras_are_the_servers(bench)
    await adapters_are_updated_under_load(bench)
    await whole_versions_are_never_mixed(bench)
    await a_cancelled_turn_leaves_the_server(bench)


async def tokens_and_extras_are_the_servers(bench: SglangBench) -> None:
    spec = bench.floor.manager.state.instances.records[InstanceId("s")].spec
    assert (spec.max_context_tokens, spec.kv_tokens, spec.exact_continuation) == (512, 4096, False)
    asked = Sampling(8, seed=5, topk_logprobs=3, prompt_logprobs=True, topk_prompt_logprobs=2)
    result = await bench.floor.generate(turn("extras", asked))
    assert list(result.tokens) == bench.expected(5, 8)
    assert list(result.logprobs) == pytest.approx([logprob_of(t) for t in result.tokens])
    assert [len(row) for row in result.topk] == [3] * 8
    assert result.prompt_logprobs is not None
    assert list(result.prompt_logprobs[1:]) == pytest.approx([logprob_of(t) for t in PROMPT[1:]])
    assert [None if row is None else len(row) for row in result.prompt_topk] == [None, 2, 2, 2, 2]
    stop = result.tokens[3]
    stopping = Sampling(8, seed=5, stop_token_ids=(stop,))
    stopped = await bench.floor.generate(turn("stopped", stopping))
    assert stopped.reason is FinishReason.STOP
    assert list(stopped.tokens) == list(result.tokens)[: list(result.tokens).index(stop) + 1]


async def adapters_are_updated_under_load(bench: SglangBench) -> None:
    """Two adapters, each updated five times while turns of all versions run."""
    versions = [f"job-{job}-step-{step}" for step in range(UPDATES // 2) for job in range(2)]
    files = {name: bench.publish_adapter(name, seed) for seed, name in enumerate(versions)}
    running: list[asyncio.Task[CompleteTurn]] = []
    for number, version in enumerate(versions):
        line = version.partition("-step")[0]
        bench.floor.rollout.publish(version, BASE, line=line, adapter=True)
        for n in range(4):
            spec = turn(f"{version}-{n}", Sampling(40, seed=n), version=version)
            running.append(asyncio.create_task(bench.floor.generate(spec)))
        beside = turn(f"beside-{number}", Sampling(40, seed=number))
        running.append(asyncio.create_task(bench.floor.generate(beside)))
        await until(lambda due=number: sum(t.done() for t in running) >= due)  # type: ignore[misc]
    results = await asyncio.gather(*running)
    loaded = bench.server.calls.count("load_lora_adapter")
    assert loaded == UPDATES, (bench.folder / "s.log").read_text()[-2000:]
    for result in results:
        version, _, seed = str(result.turn).rpartition("-")
        adapter = ""
        if version != "beside":
            assert result.version == version
            adapter = fingerprint(files[version])
        assert list(result.tokens) == bench.expected(int(seed), 40, adapter=adapter), result.turn
    assert bench.server.calls.count("update") == 1, "an adapter must not change whole weights"


async def whole_versions_are_never_mixed(bench: SglangBench) -> None:
    versions = {BASE_VERSION: bench.base}
    for seed in (7, 8):
        folder = bench.publish_other(f"whole-{seed}", seed)
        versions[f"whole-{seed}"] = fingerprint(folder)
    bench.server.calls.clear()
    names = list(versions)
    turns = [turn(f"mixed-{n}", Sampling(30, seed=n), version=names[n % 3]) for n in range(9)]
    results = await asyncio.gather(*(bench.floor.generate(spec) for spec in turns))
    for n, result in enumerate(results):
        assert result.version == names[n % 3]
        # The tokens of one version from the first to the last: any other would change the rest.
        sampled = list(result.tokens)
        found = [v for v in names if sampled == bench.expected(n, 30, weights=versions[v])]
        assert found == [result.version]
    changes = [call for call in bench.server.calls if "lora" not in call]
    assert changes == UPDATE_ORDER * (len(changes) // len(UPDATE_ORDER))
    assert len(changes) >= 2 * len(UPDATE_ORDER)


async def a_cancelled_turn_leaves_the_server(bench: SglangBench) -> None:
    bench.server.pace_s = 0.02
    others = [turn(f"other-{n}", Sampling(40, seed=n)) for n in range(12)]
    tasks = [asyncio.create_task(bench.floor.generate(spec)) for spec in others]
    endless = asyncio.create_task(bench.floor.generate(turn("endless", Sampling(500, seed=1))))
    live = bench.floor.manager.state.turns
    await until(lambda: TurnId("endless") in live and len(live[TurnId("endless")].tokens) > 0)
    bench.floor.rollout.cancel(TurnId("endless"))
    for spec, task in zip(others, tasks, strict=True):  # it aborts that one alone
        assert list((await task).tokens) == bench.expected(spec.sampling.seed, 40)
    await until(lambda: not bench.server.running)
    endless.cancel()


@pytest.mark.parametrize("incremental", [True, False], ids=["parts", "all so far"])
def test_both_ways_to_stream_give_the_same_tokens(tmp_path: Path, incremental: bool) -> None:
    async def scenario() -> None:
        contract = SglangContract(tmp_path / "model", incremental=incremental)
        async with contract.serving(free_port()), aiohttp.ClientSession() as session:
            server = SglangServer(session, contract.url)
            await server.read_capabilities()
            whole = continued(contract.weights, "", 3, PROMPT, 12)
            assert await sampled(server, "a", [*PROMPT], Sampling(12, seed=3), 0) == whole
            # A continued turn goes on in the same stream of random numbers.
            rest = await sampled(server, "b", [*PROMPT, *whole[:5]], Sampling(12, seed=3), 5)
            assert rest == whole[5:]

    make_model("tiny", tmp_path / "model", seed=0)
    asyncio.run(scenario())


async def sampled(
    server: SglangServer, name: str, tokens: list[int], sampling: Sampling, before: int
) -> list[int]:
    parts = [part async for part in server.stream(name, tokens, sampling, before)]
    return [token for part in parts for token in part.tokens]


def test_what_the_server_does_or_refuses_is_an_error_of_the_turn(tmp_path: Path) -> None:
    async def scenario() -> None:
        contract = SglangContract(tmp_path / "model")
        async with contract.serving(free_port()), aiohttp.ClientSession() as session:
            server = SglangServer(session, contract.url)
            await server.read_capabilities()
            once = Sampling(4, seed=1)
            with pytest.raises(ConfigError, match="vocabulary"):
                await sampled(server, "a", [1, 99_999], once, 0)
            with pytest.raises(ConfigError, match="fill a context of 512"):
                await sampled(server, "a", [1] * 512, once, 0)
            with pytest.raises(RefusedError, match="cannot be continued on SGLang"):
                await sampled(server, "a", [1], replace(once, presence_penalty=1.0), 1)
            with pytest.raises(RefusedError, match="Lark"):
                await sampled(server, "a", [1], replace(once, grammar=Grammar("lark", "x")), 0)
            with pytest.raises(ConfigError, match="refused"):
                await server.load_adapter("none", tmp_path)
            adapter = ServerBench(RolloutFloor(), tmp_path).publish_adapter("a", 1)
            await server.load_adapter("a", adapter)
            await server.unload_adapter("a")
            assert contract.adapters == {}
            with pytest.raises(ConfigError, match="refused"):
                await server.unload_adapter("a")
            contract.weight_version = "somebody else's"
            with pytest.raises(UnavailableError, match="somebody else's"):
                await sampled(server, "a", [1], once, 0)

    make_model("tiny", tmp_path / "model", seed=0)
    asyncio.run(scenario())


def test_a_server_of_our_own_is_started_with_options_that_it_has(tmp_path: Path) -> None:
    options = argparse.Namespace(server_options="--tp-size 2", kind="dedicated")
    command, _ = SglangServer.command("/opt/python", tmp_path, 4567, tmp_path, options)
    assert command[:3] == ["/opt/python", "-m", "sglang.launch_server"]
    parser = argparse.ArgumentParser(exit_on_error=True)
    for name in ("--model-path", "--host", "--max-lora-rank", "--max-loras-per-batch"):
        parser.add_argument(name)
    for name in ("--port", "--tp-size"):
        parser.add_argument(name, type=int)
    for name in ("incremental-streaming-output", "enable-lora", "enable-deterministic-inference"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--lora-target-modules", nargs="*")
    found = parser.parse_args(command[3:])
    assert (found.port, found.tp_size, found.max_loras_per_batch) == (4567, 2, "5")
