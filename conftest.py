"""For every test of the suite."""

import gc


def pytest_collection_finish() -> None:
    """What is imported by now stays to the end: the garbage collector need not look through it after every test."""
    gc.freeze()
