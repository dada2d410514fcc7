"""Whether a node can hold one more deployment's state: the residency constraint (WEAVE 3.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slackwater.model.residency import StateBudgets


@dataclass(frozen=True, slots=True)
class ImageSize:
    """The size of an image of state. A `warm` image always keeps its place in host memory."""

    bytes: int
    warm: bool


@dataclass(frozen=True, slots=True)
class DeploymentNeeds:
    """What a deployment needs at the same time to run: device memory, and these images."""

    device_bytes: int
    images: tuple[str, ...]


def explain_refusal(
    budgets: StateBudgets,
    images: Mapping[str, ImageSize],
    kept: Sequence[DeploymentNeeds],
    asked: DeploymentNeeds,
) -> str | None:
    """Why the deployment does not fit beside those that are kept; None if it fits.

    A shared image counts once. Warm images reserve host memory. All other images must fit on disk,
    and for each deployment its other images must fit into host memory beside the warm ones, so that
    it can be loaded.
    """
    if asked.device_bytes > budgets.device_bytes:
        return (
            f"needs {asked.device_bytes} bytes on the device, "
            f"of which the node gives {budgets.device_bytes}; raise residency.device_mb"
        )

    def size(names: Sequence[str], *, warm: bool) -> int:
        return sum(images[name].bytes for name in names if images[name].warm is warm)

    held = {name for each in kept for name in each.images}
    fresh = [name for name in asked.images if name not in held]
    reserved = size(list(images), warm=True)
    together = [size(each.images, warm=False) for each in (*kept, asked)]
    if reserved + max(together) > budgets.host_bytes:
        need = size(asked.images, warm=False) + size(fresh, warm=True)
        left = max(budgets.host_bytes - reserved + size(fresh, warm=True), 0)
        why = " to stay warm" if size(fresh, warm=True) else " to come up"
        return (
            f"needs {need} bytes of host memory{why}, of which {left} of {budgets.host_bytes} "
            "are not reserved; raise residency.host_mb or remove another model first"
        )
    spilled = size(list(images), warm=False)
    if spilled > budgets.disk_bytes:
        need = size(fresh, warm=False)
        left = max(budgets.disk_bytes - spilled + need, 0)
        return (
            f"needs {need} bytes of the disk tier, of which {left} of {budgets.disk_bytes} "
            "are not taken; raise residency.disk_mb or remove another model first"
        )
    return None
