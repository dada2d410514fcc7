"""Two models in one process on one pool of pages, as co-serving will have them."""

from tiny_engine import CONFIG, KV_BYTES_PER_BLOCK, Collected, engine, net, prompt, request, run

from slackwater.engine.config import EngineConfig
from slackwater.engine.cpu.executor import CpuExecutor
from slackwater.engine.engine import Engine
from slackwater.engine.pages import HostPagePool


def test_pages_move_from_one_model_to_another_and_outputs_stay_exact() -> None:
    pool = HostPagePool(40 * KV_BYTES_PER_BLOCK, 4096)
    config = EngineConfig(max_running=8, max_step_tokens=64)
    first, second = (
        Engine(net(seed), config, executor=CpuExecutor(CONFIG, config, pool)) for seed in (0, 1)
    )
    filling = [request(i, prompt(i, 70), max_tokens=20, seed=i) for i in range(8)]
    assert run(first, *filling).tokens == run(engine(), *filling).tokens
    wanted = request(1, prompt(99, 200), max_tokens=100)
    second.add(wanted)
    collected = Collected()
    for _ in range(12):
        collected.take(second)
    assert collected.tokens == {}, "the first model's prefixes hold the pages"
    assert first.reclaim_pages(1000) > 0
    while second.busy:
        collected.take(second)
    assert collected.tokens[1] == run(engine(seed=1), wanted).tokens[1]
    again = run(first, filling[3])
    assert again.tokens[3] == run(engine(), filling[3]).tokens[3]
