"""Measures what each kind of slack gave since the service started, against the same work without
it.

The activity sampler drives it. Time is in device seconds; money needs prices (`[prices]`).
"""

from dataclasses import dataclass
from typing import Any

from slackwater.model.ids import JobId
from slackwater.model.instance import InstanceKind
from slackwater.model.slack import SlackRow
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.settings import PriceSettings

_HOUR_S = 3600.0


@dataclass(slots=True)
class CapacityUse:
    """One kind of capacity: how long it was present, and how long it was busy."""

    present_s: float = 0.0
    busy_s: float = 0.0


class SlackMeter:
    """Adds up samples; a restart of the service begins again at zero."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._capacity: dict[str, CapacityUse] = {}
        self._phases_alone_s = self._phases_used_s = 0.0
        self._seen_s: dict[JobId, float] = {}
        self._reserved_core_s = self._granted_core_s = 0.0

    def record_worker(self, kind: str, passed_s: float, *, busy: bool) -> None:
        """Add a worker of that kind, which was present and perhaps busy."""
        use = self._capacity.setdefault(kind, CapacityUse())
        use.present_s += passed_s
        use.busy_s += passed_s * busy

    def sample(self, passed_s: float) -> None:
        """Sample shared nodes and the cores of sandboxes."""
        self._sample_phases(passed_s)
        environments, cores = self._plane.actions.cores_in_use()
        self._reserved_core_s += passed_s * environments
        self._granted_core_s += passed_s * cores

    def _sample_phases(self, passed_s: float) -> None:
        keeper = self._plane.controller.phases
        if keeper is None:
            return
        nodes_in_use: set[str] = set()
        living: dict[JobId, float] = {}
        for entry in self._plane.controller.jobs.entries():
            state = None if entry.stage.over else keeper.scheduler.find(entry.job)
            if state is None or state.placement is None:
                continue
            nodes = (*state.placement.rollout_nodes, *state.placement.train_nodes)
            nodes_in_use.update(nodes)
            more_s = state.observed_s - self._seen_s.get(entry.job, 0.0)
            self._phases_alone_s += max(more_s, 0.0) * len(nodes)
            living[entry.job] = state.observed_s
        self._seen_s = living
        self._phases_used_s += passed_s * len(nodes_in_use)

    # ---- reports ----
    def capacity(self) -> list[dict[str, Any]]:
        """What is paid for: kinds of workers, their hours and, with prices, their cost."""
        prices = self._plane.settings.prices
        return [
            {
                "kind": kind,
                "present_h": round(use.present_s / _HOUR_S, 4),
                "busy": round(use.busy_s / max(use.present_s, 1e-9), 4),
                "dollars": _dollars(prices, kind, use.present_s),
            }
            for kind, use in self._capacity.items()
        ]

    def rows(self) -> list[dict[str, Any]]:
        """By kind of slack; kinds that this service does not use are left out."""
        prices, gauges = self._plane.settings.prices, self._plane.controller.weights.gauges()
        found: list[SlackRow] = []
        device, core = prices.device_per_h, prices.core_per_h
        if self._phases_used_s:
            alone, used = self._phases_alone_s / _HOUR_S, self._phases_used_s / _HOUR_S
            detail = "finished phases, on nodes of their own"
            found.append(SlackRow("phases", "device h", alone, used, device, device, detail))
        if (borrowed := self._capacity.get(InstanceKind.BORROWED)) is not None:
            loans = self._plane.rollout.lending
            detail = f"{0 if loans is None else loans.loans} loans, paid for by the served model"
            alone = borrowed.busy_s / _HOUR_S
            found.append(SlackRow("serving", "device h", alone, 0.0, device, 0.0, detail))
        if (spot := self._capacity.get(InstanceKind.SPOT)) is not None:
            hours, cheap = spot.present_s / _HOUR_S, prices.spot_device_per_h
            detail = "the same hours at the price of spot"
            found.append(SlackRow("spot", "device h", hours, hours, device, cheap, detail))
        if self._reserved_core_s:
            alone, used = self._reserved_core_s / _HOUR_S, self._granted_core_s / _HOUR_S
            detail = "a core for every open environment"
            found.append(SlackRow("actions", "core h", alone, used, core, core, detail))
        if gauges["pulled_whole_bytes"]:
            alone, used = gauges["pulled_whole_bytes"] / 1e9, gauges["pulled_bytes"] / 1e9
            detail = f"{gauges['pulls_by_delta']:.0f} of {gauges['pulls']:.0f} pulls are deltas"
            found.append(SlackRow("weights", "GB", alone, used, detail=detail))
        return [row.to_dict() for row in found]


def _dollars(prices: PriceSettings, kind: str, present_s: float) -> float | None:
    if not prices.device_per_h:
        return None
    special = {"borrowed": 0.0, "spot": prices.spot_device_per_h}
    return round(special.get(kind, prices.device_per_h) * present_s / _HOUR_S, 4)
