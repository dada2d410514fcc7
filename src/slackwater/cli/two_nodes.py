"""The smallest fleet that jobs can share: one node for rollouts, one for training."""

from collections.abc import Sequence

_POOLS = """
[[pools]]
name = "rollout"
engines = 1
[[pools]]
name = "train"
engines = 0
trainers = 1
"""


def two_nodes(rollout: Sequence[int] = (), train: Sequence[int] = ()) -> str:
    """A fleet file with one engine node and one trainer node, pinned to these cores if given."""
    nodes = (("r0", "rollout", rollout), ("t0", "train", train))
    return _POOLS + "".join(
        f'[[nodes]]\nname = "{name}"\npool = "{pool}"\n'
        + (f"cores = {list(cores)}\n" if cores else "")
        for name, pool, cores in nodes
    )
