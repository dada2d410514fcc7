"""What is shown while something takes long."""

import numba

from slackwater.cli.progress import announce_compilation


def test_the_first_compilation_is_announced_once_and_later_calls_are_not() -> None:
    said: list[str] = []
    double, triple = numba.njit(lambda x: 2 * x), numba.njit(lambda x: 3 * x)
    with announce_compilation(said.append):
        assert not said
        assert (double(2), triple(2)) == (4, 6)
        assert len(said) == 1
    with announce_compilation(said.append):
        assert double(3) == 6
    assert len(said) == 1
