"""What is shown while something takes long."""

import numba
import pytest

from slackwater.cli.progress import saying_that_it_compiles, stage_bar


def test_the_first_compilation_is_announced_once_and_later_calls_are_not() -> None:
    said: list[str] = []
    double, triple = numba.njit(lambda x: 2 * x), numba.njit(lambda x: 3 * x)
    with saying_that_it_compiles(said.append):
        assert not said
        assert (double(2), triple(2)) == (4, 6)
        assert len(said) == 1
    with saying_that_it_compiles(said.append):
        assert double(3) == 6
    assert len(said) == 1


def test_what_takes_long_says_what_it_does_also_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with stage_bar("cluster") as move:
        move("solo", 0.1)
        move("solo", 0.2)
        move("shared", 0.5)
    said = capsys.readouterr()
    assert said.err.splitlines() == ["cluster: starting", "cluster: solo", "cluster: shared"]
    assert not said.out
