"""Whether a node can keep one more deployment's state: the residency constraint (WEAVE 3.2, 4.1), decided before anything is placed."""

from collections.abc import Sequence

from slackwater.model.residency import StateBudgets

Sizes = tuple[int, int, bool]  # bytes on the device, bytes on the host, whether it must stay warm


def refusal(budgets: StateBudgets, kept: Sequence[Sizes], asked: Sizes) -> str | None:
    """Why the deployment does not fit beside those that are kept; None if it does.

    Warm ones have their places on the host for good; of the others the largest must fit beside them, and all of them on disk,
    so that whatever is asked for can always be brought up.
    """
    device, host, _ = asked
    if device > budgets.device_bytes:
        return f"needs {device} bytes on the device, of which the node gives {budgets.device_bytes}"
    everyone = [*kept, asked]
    reserved = sum(size for _, size, warm in everyone if warm)
    largest = max((size for _, size, warm in everyone if not warm), default=0)
    if reserved + largest > budgets.host_bytes:
        left = budgets.host_bytes - sum(size for _, size, warm in kept if warm)
        return f"needs {host} bytes of host memory to stay warm, of which {max(left, 0)} of {budgets.host_bytes} are not reserved"
    spilled = sum(size for _, size, warm in everyone if not warm)
    if spilled > budgets.disk_bytes:
        return f"needs {host} bytes of the disk tier, which has {budgets.disk_bytes} for {spilled}"
    return None
