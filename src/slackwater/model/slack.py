"""The yield of one kind of slack: the same work without sharing and with it."""

from typing import Any, Literal


def slack_row(
    kind: Literal["phases", "serving", "spot", "actions", "weights"],
    unit: Literal["device h", "core h", "GB"],
    alone: float,
    used: float,
    detail: str,
    *,
    price: float = 0.0,
    used_price: float = 0.0,
) -> dict[str, Any]:
    """`alone` is the cost of the work without sharing, `used` its cost with sharing; prices are of
    a unit.
    """
    saved_dollars = round(alone * price - used * used_price, 4) if price else None
    return {
        "kind": kind,
        "unit": unit,
        "alone": round(alone, 4),
        "used": round(used, 4),
        "saved": round(alone - used, 4),
        "saved_dollars": saved_dollars,
        "detail": detail,
    }
