"""Memory that a service lends, and takes back."""

from hypothesis import given
from hypothesis import strategies as st

from slackwater.model.serving import ServingSlo
from slackwater.policy.serving.arbiter import Arbiter
from slackwater.policy.serving.kv_budget import KvBudget
from slackwater.policy.serving.modes import find_mode
from slackwater.policy.serving.step_cost import StepCost

COST = StepCost.of((1, 2), (0.01, 0.01))


def budget(capacity: int = 1000) -> KvBudget:
    return KvBudget(capacity)


def test_a_step_is_lent_what_the_service_did_not_use_lately_less_the_headroom() -> None:
    assert budget().renew(300).lent == 1000 - 300 - 200


def test_use_of_half_the_headroom_halves_what_is_lent_at_once() -> None:
    lent = budget().renew(300)
    assert lent.cut_for(400) is lent
    assert lent.cut_for(401).lent == 250


def test_a_cut_budget_stays_cut_until_the_next_step() -> None:
    cut = budget().renew(300).cut_for(450)
    assert cut.cut_for(10) is cut
    assert cut.renew(300).lent == 500


@given(st.integers(1, 10_000), st.integers(0, 10_000), st.lists(st.integers(0, 10_000)))
def test_a_service_that_takes_all_gets_all(capacity: int, peak: int, uses: list[int]) -> None:
    held = budget(capacity).renew(peak)
    for use in uses:
        before, held = held, held.cut_for(use)
        assert 0 <= held.lent <= before.lent
        assert held.lent == 0 or use <= held.pressed_above
        assert use + held.lent <= max(capacity, use)
    assert held.cut_for(capacity).lent == 0 or held.pressed_above >= capacity


def test_the_arbiter_sets_the_budget_from_the_peak_since_the_last_step() -> None:
    arbiter = Arbiter(find_mode("foresight"), ServingSlo(0.5, 0.15), COST, COST, capacity=1000)
    for use in (100, 350, 50):
        assert not arbiter.record_memory_use(use)
    arbiter.begin_step(50)
    assert arbiter.lent == 1000 - 350 - 200
    assert arbiter.record_memory_use(500)
    assert arbiter.lent == 225


def test_a_static_partition_yields_nothing_to_either_side() -> None:
    arbiter = Arbiter(find_mode("static"), ServingSlo(0.5, 0.15), COST, COST, capacity=1000)
    arbiter.begin_step(900)
    assert not arbiter.record_memory_use(900)
    assert (arbiter.lent, arbiter.serving_limit) == (500, 500)


def test_without_lending_the_service_has_everything() -> None:
    arbiter = Arbiter(find_mode("none"), ServingSlo(0.5, 0.15), COST, COST, capacity=1000)
    arbiter.begin_step(0)
    assert (arbiter.lent, arbiter.serving_limit) == (0, 1000)


def loan(weights: int) -> Arbiter:
    slo = ServingSlo(0.5, 0.15)
    return Arbiter(find_mode("foresight"), slo, COST, COST, capacity=1000, loan_weights=weights)


def test_a_loans_weights_are_taken_from_the_memory_only_while_it_lasts() -> None:
    arbiter = loan(300)
    assert arbiter.serving_limit == 1000
    arbiter.begin_loan()
    arbiter.begin_step(100)
    assert arbiter.serving_limit == 700
    assert 0 < arbiter.lent <= 700 - 100 - 140
    arbiter.end_loan()
    assert (arbiter.serving_limit, arbiter.lent) == (1000, 0)


def test_a_service_that_needs_its_memory_has_none_to_lend() -> None:
    arbiter = loan(300)
    assert arbiter.may_lend(500)
    assert not arbiter.may_lend(560)  # 700 are left beside the weights, 140 of them headroom
    assert arbiter.kv_share(350) == 0.5
