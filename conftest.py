"""For every test of the suite."""

import gc

from slackwater.cli.checkout import load_benchmarks

load_benchmarks()


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking through all imports after every test."""
    gc.freeze()
