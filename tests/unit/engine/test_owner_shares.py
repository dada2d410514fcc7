"""One owner's many requests do not slow another's few, and nobody's answer changes for it."""

from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx
from tiny_engine import engine as tiny_engine

from slackwater.engine.engine import Engine
from slackwater.engine.owner_shares import ACTIVE_S, OwnerShares, StepTimeModel, even_shares
from slackwater.engine.request import GenerationRequest
from slackwater.engine.scheduler import TURN_STEPS
from slackwater.model.sampling import Sampling

FIXED_S, TOKEN_S = 0.001, 0.0001


def knowing_shares(*owners: str) -> OwnerShares:
    """Shares that know a step's cost, 1 ms and 0.1 ms a token; the owners' requests are in slots 0,
    1, ...
    """
    shares = OwnerShares(300)
    shares.step_time.most_tokens(1, 0.25, 1, 1)
    for tokens in (1, 20, 50) * 5:
        shares.step_time.add(tokens, FIXED_S + TOKEN_S * tokens)
    enter(shares, *owners)
    assert shares.refresh_active_owners(0.0) == (len(set(owners)) > 1)
    return shares


def enter(shares: OwnerShares, *owners: str) -> None:
    for slot, owner in enumerate(owners):
        shares.add_request(slot, owner)


def cut(shares: OwnerShares, counts: list[int], first: int = 0) -> list[int]:
    """What is left of the counts of slots `first` and those after it."""
    found = np.array(counts, np.int64)
    shares.share(np.arange(first, first + len(counts)), found)
    kept: list[int] = found.tolist()
    return kept


def test_a_step_for_two_takes_at_most_a_tenth_longer_than_for_the_quiet_one_alone() -> None:
    shares = knowing_shares("quiet", *["loud"] * 56)
    found = cut(shares, [1] * 57)
    assert found[0] == 1
    alone_s = FIXED_S + TOKEN_S
    assert FIXED_S + TOKEN_S * sum(found) <= 1.1 * alone_s + TOKEN_S
    assert sum(found) > 1, "the loud one gets on too"


def test_a_long_prompt_is_cut_and_a_short_one_of_another_owner_is_not() -> None:
    found = cut(knowing_shares("loud", "quiet"), [2000, 5])
    assert found[1] == 5
    assert 0 < found[0] <= 20


def test_an_owner_that_was_just_served_still_counts_and_later_no_more() -> None:
    shares = knowing_shares("quiet", *["loud"] * 56)
    shares.remove_request("quiet")
    assert shares.refresh_active_owners(ACTIVE_S / 2)
    rows = sum(cut(shares, [1] * 56, first=1))
    assert 1.4 * (FIXED_S + TOKEN_S) < FIXED_S + TOKEN_S * rows <= 1.5 * (FIXED_S + TOKEN_S)
    assert not shares.refresh_active_owners(3 * ACTIVE_S)


@pytest.mark.parametrize(("there", "share"), [(True, 0.1), (False, 0.5)])
def test_prompts_of_one_owner_take_little_time_and_more_while_the_other_has_no_request(
    there: bool, share: float
) -> None:
    shares = knowing_shares("quiet", "loud", "loud")
    if not there:
        shares.remove_request("quiet")
    prompt_s, step_s, prompts_s = 3 * FIXED_S, FIXED_S + TOKEN_S, 0.0
    for _ in range(1000):
        if shares.must_delay_prompts("loud"):
            shares.charge_prompts({}, step_s)
        else:
            shares.charge_prompts({"loud": 5}, prompt_s)
            prompts_s += prompt_s
        assert not shares.must_delay_prompts("quiet")
    steps_s = (1000 - prompts_s / prompt_s) * step_s
    assert prompts_s / steps_s == approx(share, rel=0.1)


def test_owners_with_equally_many_prompts_do_not_delay_each_other() -> None:
    shares = knowing_shares("one", "two", "one", "two")
    for _ in range(100):
        shares.charge_prompts({"one": 100, "two": 100}, 3 * FIXED_S)
        assert not shares.must_delay_prompts("one")
        assert not shares.must_delay_prompts("two")


def test_a_step_that_took_seconds_delays_no_prompt_for_long() -> None:
    shares = knowing_shares("quiet", "loud", "loud")
    shares.charge_prompts({"loud": 5}, 60.0)
    steps = 0
    while shares.must_delay_prompts("loud"):
        shares.charge_prompts({}, FIXED_S + TOKEN_S)
        steps += 1
    assert 0 < steps < 100


def test_the_only_request_of_an_owner_is_not_delayed_by_the_prompt_before() -> None:
    shares = knowing_shares("quiet", "loud", "loud")
    shares.charge_prompts({"loud": 5}, 3 * FIXED_S)
    assert shares.must_delay_prompts("loud")
    shares.remove_request("loud")
    assert not shares.must_delay_prompts("loud")


def test_prompts_of_a_loud_owner_wait_while_the_quiet_one_decodes() -> None:
    engine = tiny_engine(max_running=32)
    engine._clock = count(step=FIXED_S).__next__
    engine.add(GenerationRequest(0, (1, 2), Sampling(60, ignore_eos=True), "base", owner="quiet"))
    finished, added, steps, steps_with_prompts = list[int](), 1, 0, 0
    while 0 not in finished:
        while added - len(finished) < 8:
            prompt = (1, 2, 3, added % 60)
            engine.add(GenerationRequest(added, prompt, Sampling(1), "base", owner="loud"))
            added += 1
        ended = [done.request_id for done in engine.step().finished]
        engine.check_integrity()
        finished += ended
        steps += 1
        steps_with_prompts += any(ended)
    assert 1 <= steps_with_prompts <= steps / 4, "some run, and not at every step"
    while engine.busy:
        finished += [done.request_id for done in engine.step().finished]
    assert sorted(finished) == list(range(added)), "and all come to their end"


def test_rows_that_are_held_back_take_turns() -> None:
    shares, served = knowing_shares("quiet", *["loud"] * 30), set[int]()
    for _ in range(30):
        rows = np.flatnonzero(cut(shares, [1] * 31))
        shares.step_time.add(len(rows), FIXED_S + TOKEN_S * len(rows))
        shares.mark_served(rows)
        served.update(rows.tolist())
    assert served == set(range(31))


def steps_made(wanted: int, seconds: Callable[[int, int], float], steps: int) -> list[int]:
    """The tokens of so many steps of two owners that want `wanted` together, each of which took
    what `seconds(tokens, number)` says.
    """
    law, made = StepTimeModel(), list[int]()
    for _ in range(100):
        law.add(wanted, seconds(wanted, 0))  # when there was one owner, all steps were alike
    while len(made) < steps:
        tokens = min(law.most_tokens(1, 0.25, 2, wanted), wanted)
        for _ in range(TURN_STEPS if tokens < wanted else 1):
            made.append(tokens)
            law.add(tokens, seconds(tokens, len(made)))
    return made


@settings(deadline=None)
@given(st.integers(20, 400), st.floats(1e-5, 1e-3), st.floats(0.02, 1.0))
def test_what_a_step_costs_is_found_out_also_when_all_were_alike(
    wanted: int, fixed_s: float, share: float
) -> None:
    token_s = fixed_s * share
    made = steps_made(wanted, lambda tokens, number: fixed_s + token_s * tokens, 300)
    bound = max(1.25 * (fixed_s + token_s), fixed_s + 2 * token_s)
    late = [fixed_s + token_s * tokens for tokens in made[3 * TURN_STEPS :]]
    assert max(late) <= bound * 1.001
    assert np.mean(late) >= 0.9 * min(bound - token_s, fixed_s + token_s * wanted), (
        "nor is it cut further"
    )


def test_tokens_that_cost_more_as_contexts_grow_are_followed() -> None:
    def seconds(tokens: int, number: int) -> float:
        return FIXED_S + tokens * (TOKEN_S / 10) * (1 + number / 100)

    made = steps_made(60, seconds, 3000)
    longer = [seconds(tokens, number) / seconds(2, number) for number, tokens in enumerate(made)]
    assert np.mean(longer[500:]) <= 1.25
    assert np.max(longer[500:]) <= 1.5


def test_steps_that_the_machine_held_up_do_not_let_all_rows_in() -> None:
    def seconds(tokens: int, number: int) -> float:
        held_up = 40 if number % 17 == 0 else 1
        return (FIXED_S + TOKEN_S * tokens) * held_up

    assert max(steps_made(60, seconds, 3000)[200:]) <= 16


def test_where_the_fixed_part_outweighs_the_tokens_nobody_is_held_back() -> None:
    made = steps_made(256, lambda tokens, number: 0.020 + 1e-6 * tokens, 1000)
    assert sum(made[100:]) >= 0.95 * 256 * len(made[100:])


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(0, 99)), st.integers(0, 200))
def test_even_shares_give_nobody_more_than_it_wants_and_nothing_away(
    wants: dict[str, int], total: int
) -> None:
    shares = even_shares(wants, total)
    assert all(0 <= shares[owner] <= want for owner, want in wants.items())
    assert sum(shares.values()) <= total
    if wants and sum(wants.values()) <= total:
        assert shares == wants


def test_answers_are_the_same_in_company_as_alone() -> None:
    def tokens_of(*others: GenerationRequest) -> list[int]:
        engine = tiny_engine()
        params = Sampling(max_tokens=12, seed=5)
        engine.add(GenerationRequest(1, (1, 2, 3), params, "base", owner="quiet"))
        for request in others:
            engine.add(request)
        found: list[int] = []
        while engine.busy:
            out = engine.step()
            found += [
                int(token)
                for request, token in zip(out.request_ids, out.tokens, strict=True)
                if request == 1
            ]
            engine.check_integrity()
        return found

    loud = [
        GenerationRequest(
            2 + n, tuple(range(1, 40 + n)), Sampling(max_tokens=9, seed=n), "base", owner="l"
        )
        for n in range(12)
    ]
    assert tokens_of(*loud) == tokens_of()


def request(name: int, owner: str) -> GenerationRequest:
    """One that decodes for as long as a test takes."""
    return GenerationRequest(name, (1, 2), Sampling(400, ignore_eos=True), "base", owner=owner)


def engine_of_a_loud_and_a_quiet_owner() -> Engine:
    """24 rows of the loud one, 0, 1, ..., and one of the quiet one, 99; it knows a step's cost."""

    class Known(StepTimeModel):
        def add(self, tokens: int, seconds: float) -> None:
            super().add(tokens, FIXED_S + TOKEN_S * tokens)

    engine = tiny_engine(max_running=32)
    engine._scheduler._owners.step_time = Known()
    engine._clock = count(step=FIXED_S).__next__
    for name in range(24):
        engine.add(request(name, "loud"))
    engine.add(request(99, "quiet"))
    return engine


def rows_of_step(engine: Engine) -> tuple[int, ...]:
    rows: list[int] = engine.step().request_ids.tolist()
    return tuple(rows)


def test_rows_have_several_steps_in_a_row_and_then_others_do() -> None:
    engine = engine_of_a_loud_and_a_quiet_owner()
    steps = [rows_of_step(engine) for _ in range(30 * TURN_STEPS)]
    cut = [rows for rows in steps if len(rows) < 25]
    assert len(cut) > len(steps) // 2
    assert all(99 in rows for rows in steps[1:])
    assert len(set(cut)) <= 1 + len(cut) // 4, "choosing anew at each step would lengthen each"
    assert {name for rows in cut for name in rows} == {*range(24), 99}, "and nobody starves"
    engine.check_integrity()


def first_rows_of_a_turn(engine: Engine) -> tuple[int, ...]:
    """Step until other rows than before have a turn."""
    before = now = rows_of_step(engine)
    while now == before or len(now) >= 25:
        before, now = now, rows_of_step(engine)
    return now


def test_a_further_request_of_an_owner_waits_for_the_turns_end_and_a_first_one_does_not() -> None:
    engine = engine_of_a_loud_and_a_quiet_owner()
    for _ in range(30 * TURN_STEPS):  # until all prompts are computed and a step's cost is known
        engine.step()
    turn = first_rows_of_a_turn(engine)
    engine.add(request(24, "loud"))
    for _ in range(TURN_STEPS - 1):
        assert rows_of_step(engine) == turn
        assert engine.gauges()["waiting"] == 1
    engine.step()
    assert engine.gauges()["waiting"] == 0
    for _ in range(2 * TURN_STEPS):
        engine.step()
    first_rows_of_a_turn(engine)
    engine.add(request(98, "third"))
    engine.step()
    assert engine.gauges()["waiting"] == 0
    engine.check_integrity()
