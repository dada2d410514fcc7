"""The yield of one kind of slack: the same work without sharing and with it."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class SlackRow:
    """`alone` is the cost of the work without sharing, `used` its cost with sharing."""

    kind: Literal["phases", "serving", "spot", "actions", "weights"]
    unit: Literal["device h", "core h", "GB"]
    alone: float
    used: float
    price: float = 0.0  # of a unit
    used_price: float = 0.0
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        cost, saved = self.used * self.used_price, self.alone * self.price
        return {
            "kind": self.kind,
            "unit": self.unit,
            "alone": round(self.alone, 4),
            "used": round(self.used, 4),
            "saved": round(self.alone - self.used, 4),
            "saved_dollars": round(saved - cost, 4) if self.price else None,
            "detail": self.detail,
        }
