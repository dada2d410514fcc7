"""For every test of the suite."""

import gc
from collections import Counter
from pathlib import Path

import pytest

from slackwater.cli.checkout import load_benchmarks

load_benchmarks()
pytest_plugins = ["harness.forked_tests"]
gc.disable()  # until all tests are collected: what is imported stays

# In a fresh clone these compile what many others call. They come first, in as few processes as it
# takes for no two to compile the same.
_COMPILING = {
    "test_cycle_fitting": "policies",
    "test_placement_policies": "policies",
    "test_codec": "codec",
    "test_engine": "engine",
}
_SIMULATED = 20  # other tests take as long as a file of simulations at least


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that compile, then those that take longest, so that none of them is
    still running alone when the others are done; live tests come last, in an order of their own.
    """
    from harness.forked_tests import GROUP  # a plugin: pytest rewrites it when it loads it

    counts = Counter(item.path for item in items)
    tests = Path(__file__).parent / "tests"
    first = {name: place - len(_COMPILING) for place, name in enumerate(_COMPILING)}

    def place_of(item: pytest.Item) -> tuple[bool, int, int, str]:
        if tests / "process" in item.path.parents:
            return True, 0, 0, ""
        length = counts[item.path] + _SIMULATED * (tests / "sim" in item.path.parents)
        return False, first.get(item.path.stem, 0), -length, str(item.path)

    for item in items:
        if item.path.stem in _COMPILING:
            item.stash[GROUP] = _COMPILING[item.path.stem]
    items.sort(key=place_of)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking through all imports after every test."""
    gc.freeze()
    gc.enable()
