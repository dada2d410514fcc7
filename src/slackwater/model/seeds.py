"""Seeds for requests that bring none: the same recipe run again draws the same numbers.

Drawn from counters that a rerun repeats (the weights' lineage, the request's number in its sampling
session, the sample's number), never from random ids or the clock.
"""

import hashlib


def default_seed(lineage: str, seq: int, index: int) -> int:
    """63 bits from the counters."""
    digest = hashlib.blake2b(f"{lineage}\n{seq}\n{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sample_seed(seed: int, index: int) -> int:
    """Of the `index`-th sample of a request that brought `seed`; the first has the seed itself."""
    return seed if index == 0 else default_seed(f"seed:{seed}", 0, index)
