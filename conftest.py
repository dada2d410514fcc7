"""For every test of the suite."""

import gc
from collections import Counter
from pathlib import Path

import pytest

from slackwater.cli.checkout import load_benchmarks

load_benchmarks()
pytest_plugins = ["harness.forked_tests"]
gc.disable()  # until all tests are collected: what is imported stays

# In a fresh clone these compile what many others call. They come first, each in a process of its
# own, so that no two processes compile the same.
_COMPILING = ("test_cycle_fitting", "test_codec", "test_placement_policies", "test_engine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that compile, then those with the most tests; live tests come last, in
    an order of their own.
    """
    counts = Counter(item.path for item in items)
    live = Path(__file__).parent / "tests" / "process"
    first = {name: place - len(_COMPILING) for place, name in enumerate(_COMPILING)}

    def place_of(item: pytest.Item) -> tuple[bool, int, int, str]:
        if live in item.path.parents:
            return True, 0, 0, ""
        return False, first.get(item.path.stem, 0), -counts[item.path], str(item.path)

    items.sort(key=place_of)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking through all imports after every test."""
    gc.freeze()
    gc.enable()
