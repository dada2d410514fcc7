"""Two unlike models on one device: the service's answers and the rollout's tokens are what they
would be alone.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from slackwater.engine.config import EngineConfig
from slackwater.engine.coserving.executor import CoservingExecutor, CoservingStep, TokenTimes
from slackwater.engine.coserving.step_profile import measure_step_cost
from slackwater.engine.cpu.executor import CpuExecutor
from slackwater.engine.engine import Engine
from slackwater.engine.pages import HostPagePool
from slackwater.engine.request import GenerationRequest, StepOutput
from slackwater.engine.scheduler import EngineLoad
from slackwater.model.errors import RefusedError
from slackwater.model.sampling import Sampling
from slackwater.model.serving import ServingSlo
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net
from slackwater.policy.serving.arbiter import Arbiter
from slackwater.policy.serving.modes import find_mode
from slackwater.policy.serving.step_cost import StepCost

PAGE = 4096
SERVICE = NetConfig(
    family="qwen3",
    qk_norm=True,
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    max_positions=256,
    init_std=0.35,
    tied=False,
)
ROLLOUT = replace(SERVICE, vocab_size=83, num_layers=3, hidden_size=16, num_heads=2, num_kv_heads=1)
CONFIG = EngineConfig(page_bytes=PAGE, max_running=8, max_step_tokens=64)
COST = StepCost.of((1, 64), (0.005, 0.01))
Tokens = dict[int, list[int]]


class Clock:
    """A hundredth of a second passes with every look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.01
        return self.now_s


def engine(net: NetConfig, pool: HostPagePool) -> Engine:
    torch.set_num_threads(1)
    return Engine(load_net(net, seed=1), CONFIG, executor=CpuExecutor(net, CONFIG, pool))


def requests(net: NetConfig, count: int, seed: int) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    return [
        GenerationRequest(
            number,
            tuple(rng.integers(0, net.vocab_size, int(rng.integers(5, 120))).tolist()),
            Sampling(max_tokens=int(rng.integers(2, 40)), seed=number),
            "base",
        )
        for number in range(count)
    ]


def alone(net: NetConfig, wanted: list[GenerationRequest]) -> Tokens:
    source = engine(net, HostPagePool(2000 * PAGE, PAGE))
    found: Tokens = {}
    for request in wanted:
        source.add(request)
    while source.busy:
        collect(found, source.step())
    return found


def collect(found: Tokens, output: StepOutput | None) -> None:
    if output is not None:
        pairs = zip(output.request_ids.tolist(), output.tokens.tolist(), strict=True)
        for request, token in pairs:
            found.setdefault(request, []).append(token)


class Device:
    """An executor on a pool of so many pages, with rollouts that come back when they are given
    back.
    """

    def __init__(self, pages: int, mode: str = "foresight") -> None:
        self.pool = HostPagePool(pages * PAGE, PAGE)
        self.service = engine(SERVICE, self.pool)
        slo = ServingSlo(0.5, 0.15)
        arbiter = Arbiter(find_mode(mode), slo, COST, COST, capacity=self.pool.capacity)
        self.clock = Clock()
        self.executor = CoservingExecutor(self.service, arbiter, self.clock)
        self.served: Tokens = {}
        self.made: Tokens = {}
        self.waiting: dict[int, GenerationRequest] = {}
        self.done: list[int] = []
        self.moves = 0

    def lend(self) -> None:
        self.executor.lend(engine(ROLLOUT, self.pool))

    def step(self) -> CoservingStep:
        step = self.executor.step()
        self.executor.check_integrity()
        collect(self.served, step.served)
        collect(self.made, step.rolled_out)
        for request in step.given_back:
            self.give_back(request)
        if step.rolled_out is not None:
            for done in step.rolled_out.finished:
                self.waiting.pop(done.request_id)
                self.done.append(done.request_id)
        return step

    def give_back(self, request: int) -> None:
        self.moves += 1
        known = tuple(self.made.get(request, ()))
        self.waiting[request] = replace(self.waiting[request], generated=known)

    def roll_out(self, request: GenerationRequest) -> None:
        self.waiting[request.request_id] = request
        self.executor.roll_out(request)


def test_the_memory_of_a_rollouts_weights_is_the_services_again_when_the_loan_ends() -> None:
    device = Device(400)
    free = len(device.pool._free)
    device.executor.reserve_weight_pages(100 * PAGE)
    assert len(device.pool._free) == free - 100
    device.lend()
    assert device.executor.arbiter.serving_limit == 300
    assert device.executor.arbiter.lent <= 300
    device.executor.take_back()
    assert len(device.pool._free) == free
    assert device.executor.arbiter.serving_limit == 400


def test_weights_that_leave_the_service_too_little_memory_are_refused() -> None:
    device = Device(400)
    free = len(device.pool._free)
    with pytest.raises(RefusedError, match="needs the memory"):
        device.executor.reserve_weight_pages(400 * PAGE)
    assert len(device.pool._free) == free
    assert device.executor.arbiter.serving_limit == 400


@pytest.mark.parametrize("mode", ["foresight", "dual", "prefix"])
def test_both_models_answer_as_if_they_were_alone(mode: str) -> None:
    device = Device(400, mode)
    device.lend()
    serving, rollouts = requests(SERVICE, 12, 1), requests(ROLLOUT, 8, 2)
    for request in rollouts:
        device.roll_out(request)
    for number in range(4000):
        if number % 9 == 0 and serving:
            device.executor.serve(serving.pop())
        device.step()
        if not serving and not device.executor.busy:
            break
    assert device.served == alone(SERVICE, requests(SERVICE, 12, 1))
    assert device.made == alone(ROLLOUT, requests(ROLLOUT, 8, 2))


def test_urgent_prompts_run_alone_and_change_no_answer() -> None:
    """Each request is served as it comes, and each comes while others decode."""
    device = Device(400)
    device.executor.reserve_weight_pages(PAGE)
    device.lend()
    for request in requests(ROLLOUT, 8, 2):
        device.roll_out(request)
    serving, waited = requests(SERVICE, 30, 1), 0
    for number in range(6000):
        if number % 7 == 0 and serving:
            device.executor.serve(serving.pop())
        before = device.service.load()
        tokens = sum(map(len, device.served.values()))
        step = device.step()
        made = sum(map(len, device.served.values())) - tokens
        waited += step.served is not None and before.decoding > 0 and made < before.decoding
        if not serving and not device.executor.busy:
            break
    assert waited > 0, "no prompt ever ran alone"
    assert device.served == alone(SERVICE, requests(SERVICE, 30, 1))
    assert device.made == alone(ROLLOUT, requests(ROLLOUT, 8, 2))


def test_decoding_requests_that_wait_have_their_last_token_before_the_prompts_step() -> None:
    times = TokenTimes(0.15)
    for number in (1, 2):
        times.record_arrival(number, 0.0)

    def step(now_s: float, *numbers: int) -> float:
        ids = np.array(numbers, np.uint32)
        times.record_step(StepOutput(ids, ids, np.zeros(len(ids), np.float32)), now_s)
        return times.state(EngineLoad([], 1, 10)).oldest_token_s

    assert step(0.1, 1) == 0.1
    assert step(0.2) == step(0.3, 2) == 0.1  # a prompt's step, and one that ends it
    assert step(0.4, 1, 2) == 0.4


def test_a_service_that_needs_the_memory_gets_it_and_no_token_of_the_rollout_is_lost() -> None:
    device = Device(80)
    device.lend()
    rollouts = [
        replace(request, params=Sampling(max_tokens=110, seed=request.request_id))
        for request in requests(ROLLOUT, 8, 2)
    ]
    for request in rollouts:
        device.roll_out(request)
    for _ in range(30):
        device.step()
    for request in requests(SERVICE, 8, 3):
        device.executor.serve(request)
    for _ in range(4000):
        if not device.service.busy:
            break
        device.step()
    assert device.served == alone(SERVICE, requests(SERVICE, 8, 3))
    assert device.moves > 0
    for number in device.executor.take_back():
        device.give_back(number)
    assert device.executor.rollout is None
    elsewhere = engine(ROLLOUT, HostPagePool(2000 * PAGE, PAGE))
    for request in device.waiting.values():
        elsewhere.add(request)
    while elsewhere.busy:
        collect(device.made, elsewhere.step())
    assert device.made == alone(ROLLOUT, rollouts)


def test_a_rollout_that_leaves_gives_every_page_back() -> None:
    device = Device(300)
    before = len(device.pool._free)
    device.lend()
    for request in requests(ROLLOUT, 6, 2):
        device.roll_out(request)
    for _ in range(20):
        device.step()
    assert len(device.pool._free) < before
    given = device.executor.take_back()
    assert set(given) == set(device.waiting)
    assert len(device.pool._free) == before


def test_a_rollout_that_finds_no_memory_says_that_it_is_stalled() -> None:
    device = Device(60)
    for request in requests(SERVICE, 6, 3):
        device.executor.serve(replace(request, params=Sampling(max_tokens=100, ignore_eos=True)))
    for _ in range(20):
        device.step()
    device.lend()
    assert device.executor.arbiter.lent < 30
    for request in requests(ROLLOUT, 4, 2):
        device.roll_out(replace(request, prompt=request.prompt * 2))
    stalled = False
    for _ in range(3000):
        device.step()
        stalled = stalled or device.executor.stalled
        if stalled or not device.service.busy:
            break
    assert stalled or device.made, "it either ran in what was left or said that it could not"


def test_a_device_is_lent_once_and_refuses_rollouts_when_it_is_not() -> None:
    device = Device(300)
    with pytest.raises(RefusedError, match="not lent"):
        device.executor.roll_out(requests(ROLLOUT, 1, 0)[0])
    device.lend()
    with pytest.raises(RefusedError, match="lent already"):
        device.lend()


def test_prefixes_of_a_rollout_go_when_their_lease_is_over() -> None:
    device = Device(400)
    device.lend()
    request = replace(requests(ROLLOUT, 1, 5)[0], params=Sampling(max_tokens=4))
    device.roll_out(request)
    while device.executor.busy:
        device.step()
    rollout = device.executor.rollout
    assert rollout is not None and rollout.num_unused_prefixes > 0
    for _ in range(1200):
        device.step()
    assert rollout.num_unused_prefixes == 0


def test_costs_are_measured_on_the_engine_itself() -> None:
    source = engine(SERVICE, HostPagePool(600 * PAGE, PAGE))
    cost = measure_step_cost(source, SERVICE.vocab_size, (8, 64))
    assert cost.prompt.rows == (8, 64)
    assert cost.decode.rows[0] == 1
    assert not source.busy


def test_a_service_whose_prefixes_fill_the_pool_makes_room_for_a_rollout() -> None:
    device = Device(60)
    for number, request in enumerate(requests(SERVICE, 30, 3)):
        device.executor.serve(replace(request, request_id=number, params=Sampling(max_tokens=2)))
        while device.executor.busy:
            device.step()
    assert device.service.num_unused_prefixes > 0
    while len(device.pool._free):
        device.pool.take()
    with pytest.raises(RefusedError, match="raise --kv-mb"):
        device.lend()
    device.executor.reclaim_service_share(0.5)
    device.lend()


def test_a_model_whose_steps_cannot_be_measured_is_refused_and_leaves_nothing() -> None:
    pool = HostPagePool(12 * PAGE, PAGE)
    small = engine(SERVICE, pool)
    small.arena.limit = 6
    with pytest.raises(RefusedError, match="too little to measure"):
        measure_step_cost(small, SERVICE.vocab_size)
    assert not small.busy


def test_a_rollout_that_never_stops_growing_is_held_to_its_budget_and_the_service_answers() -> None:
    """Its turns have no end; after each cut the youngest goes, and what is left waits for
    memory.
    """
    device = Device(90)
    device.lend()
    endless = Sampling(max_tokens=240, ignore_eos=True)
    for request in requests(ROLLOUT, 8, 2):
        device.roll_out(replace(request, prompt=request.prompt[:10], params=endless))
    for number in range(3000):
        if number % 300 == 0:
            device.executor.serve(
                replace(requests(SERVICE, 8, 3)[number // 300 % 8], request_id=number)
            )
        device.step()  # looks after each step whether the rollout is within its budget
    while device.service.busy:
        device.step()
    answered = alone(
        SERVICE,
        [
            replace(requests(SERVICE, 8, 3)[number // 300 % 8], request_id=number)
            for number in range(0, 3000, 300)
        ],
    )
    assert device.served == answered
    assert device.executor.rollout is not None


def test_a_pool_that_runs_dry_gives_the_service_the_rollouts_pages_down_to_the_last() -> None:
    device = Device(40)
    device.lend()
    for request in requests(ROLLOUT, 8, 2):
        device.roll_out(replace(request, params=Sampling(max_tokens=100, ignore_eos=True)))
    for _ in range(40):
        device.step()
    wanted = [
        replace(request, params=Sampling(max_tokens=60, ignore_eos=True))
        for request in requests(SERVICE, 8, 3)
    ]
    for request in wanted:
        device.executor.serve(request)
    while device.service.busy:
        device.step()
    assert device.served == alone(SERVICE, wanted)
    assert device.moves > 0


def test_a_promise_that_is_broken_takes_every_page_and_gives_them_back_when_it_is_kept() -> None:
    """The service is sent more than it can answer in time; the clock of the test is what makes it
    late.
    """
    device = Device(400)
    device.lend()
    for request in requests(ROLLOUT, 6, 2):
        device.roll_out(request)
    for _ in range(20):
        device.step()
    rollout = device.executor.rollout
    assert rollout is not None and len(device.waiting) > 0
    wanted = requests(SERVICE, 40, 3)
    for request in wanted:
        device.executor.serve(request)
    clock = device.clock
    while device.executor.keeps_slo():
        assert device.service.busy
        device.step()
    device.step()
    assert not rollout.busy and device.executor.arbiter.lent == 0
    assert rollout.arena.mapped_pages <= 1, "an idle rollout holds its scratch block"
    assert set(device.waiting) == set(range(6)) - set(device.done)
    while device.service.busy:
        assert device.step().rolled_out is None
    assert device.served == alone(SERVICE, wanted)
    clock.now_s += 31.0
    for request in list(device.waiting.values()):
        device.executor.roll_out(request)
    while device.executor.busy:
        device.step()
    arbiter = device.executor.arbiter
    assert arbiter.lent == arbiter.budget.lent > 0
    assert device.made == alone(ROLLOUT, requests(ROLLOUT, 6, 2))


def test_prompts_that_are_in_the_cache_are_no_load_to_the_service() -> None:
    """Two dozen requests for one long prompt, together: computed each, they would wait for too
    long.
    """
    device = Device(400)
    prompt = requests(SERVICE, 1, 5)[0].prompt[:1] * 200
    wanted = [GenerationRequest(n, prompt, Sampling(max_tokens=2), "base") for n in range(25)]
    first, *others = wanted
    device.executor.serve(first)
    assert device.service.count_uncached_tokens(first.request_id) == 200
    while device.service.busy:
        device.step()
    clock = device.clock
    for request in others:
        clock.now_s -= 0.01  # all of them at once
        device.executor.serve(request)
        assert device.service.count_uncached_tokens(request.request_id) <= 16
    assert device.executor.keeps_slo()
