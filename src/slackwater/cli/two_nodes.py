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
    """The text of its file: a node with an engine and a node with a trainer, each on these cores of
    the machine, or on any.
    """
    nodes = (("r0", "rollout", rollout), ("t0", "train", train))
    return _POOLS + "".join(
        f'[[nodes]]\nname = "{name}"\npool = "{pool}"\n'
        + (f"cores = {list(cores)}\n" if cores else "")
        for name, pool, cores in nodes
    )
