"""What a benchmark shows while it runs."""

import pytest

from benchmarks.cli.stage_bar import stage_bar


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
