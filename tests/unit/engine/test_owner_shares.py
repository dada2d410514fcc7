"""One owner's many requests do not slow another's few, and nobody's answer changes for it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import engine as tiny_engine

from slackwater.engine.owner_shares import ABOUT_S, OwnerShares, StepLaw, even_shares
from slackwater.engine.request import GenerationRequest
from slackwater.model.sampling import Sampling

FIXED_S, TOKEN_S = 0.001, 0.0001


def knowing_shares(*owners: str) -> OwnerShares:
    """Shares that know a step's cost, 1 ms and 0.1 ms a token; the owners' requests are in slots 0, 1, ..."""
    shares = OwnerShares(300)
    for tokens in (1, 20, 50) * 5:
        shares.computed(tokens, FIXED_S + TOKEN_S * tokens)
    enter(shares, *owners)
    assert shares.several(0.0) == (len(set(owners)) > 1)
    return shares


def enter(shares: OwnerShares, *owners: str) -> None:
    for slot, owner in enumerate(owners):
        shares.entered(slot, owner)


def cut(shares: OwnerShares, counts: list[int], first: int = 0) -> list[int]:
    """What is left of the counts of slots `first` and those after it."""
    found = np.array(counts, np.int64)
    shares.share(np.arange(first, first + len(counts)), found)
    kept: list[int] = found.tolist()
    return kept


def test_a_step_for_two_takes_at_most_a_quarter_longer_than_for_the_quiet_one_alone() -> None:
    shares = knowing_shares("quiet", *["loud"] * 56)
    found = cut(shares, [1] * 57)
    assert found[0] == 1
    alone_s = FIXED_S + TOKEN_S
    assert FIXED_S + TOKEN_S * sum(found) <= 1.25 * alone_s + TOKEN_S
    assert sum(found) > 1, "the loud one gets on too"


def test_a_long_prompt_is_cut_and_a_short_one_of_another_owner_is_not() -> None:
    found = cut(knowing_shares("loud", "quiet"), [2000, 5])
    assert found[1] == 5
    assert 0 < found[0] <= 20


def test_an_owner_that_was_just_served_still_counts_and_later_no_more() -> None:
    shares = knowing_shares("quiet", *["loud"] * 56)
    shares.left("quiet")
    assert shares.several(ABOUT_S / 2)
    assert sum(cut(shares, [1] * 56, first=1)) < 10
    assert not shares.several(3 * ABOUT_S)


def test_rows_that_are_held_back_take_turns() -> None:
    shares, served = knowing_shares("quiet", *["loud"] * 30), set[int]()
    for _ in range(30):
        rows = np.flatnonzero(cut(shares, [1] * 31))
        shares.computed(len(rows), FIXED_S + TOKEN_S * len(rows))
        shares.served(rows)
        served.update(rows.tolist())
    assert served == set(range(31))


def test_where_the_fixed_part_outweighs_the_tokens_nobody_is_held_back() -> None:
    shares = OwnerShares(256)
    for tokens in (1, 200, 256) * 5:
        shares.computed(tokens, 0.020 + 1e-5 * tokens)
    enter(shares, "quiet", *["loud"] * 255)
    assert shares.several(0.0)
    assert cut(shares, [1] * 256) == [1] * 256


def test_a_law_that_was_never_seen_to_vary_bounds_nothing() -> None:
    law = StepLaw()
    for _ in range(100):
        law.add(7, 0.001)
    assert law.most_tokens(1, 0.5) is None


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
