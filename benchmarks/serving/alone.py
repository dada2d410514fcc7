"""How much load one device bears alone, in virtual time, from the costs of its steps as
measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.serving.arrivals import scaled
from slackwater.model.serving import ServingSlo
from slackwater.policy.serving.step_cost import StepCost
from slackwater.sim.serving.service_share import ServedRequest, ServiceShare
from slackwater.sim.serving.serving_trace import Arrival

_DENSITIES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)


@dataclass(frozen=True, slots=True)
class Alone:
    """A device that only serves, with memory for `limit_tokens`."""

    cost: StepCost
    slo: ServingSlo
    step_tokens: int
    limit_tokens: int

    def served(self, arrivals: Sequence[Arrival]) -> list[ServedRequest]:
        """Every request, answered to its end."""
        share = ServiceShare(self.step_tokens, self.slo.tpot_s, self.limit_tokens)
        requests = [
            ServedRequest(number, one.at_s, one.prompt_tokens, one.output_tokens, one.cached_tokens)
            for number, one in enumerate(arrivals)
        ]
        place, now_s = 0, 0.0
        while place < len(requests) or share.busy:
            if not share.busy:
                now_s = max(now_s, requests[place].arrival_s)
            while place < len(requests) and requests[place].arrival_s <= now_s:
                share.add(requests[place])
                place += 1
            now_s += self.cost.step_s(share.begin_step())
            first, _ = share.end_step(now_s)
            for request in first:
                share.decode(request, now_s)
        return requests

    def attainment(self, windows: Sequence[Sequence[Arrival]]) -> float:
        """Over all windows, each from an idle device on."""
        requests = [request for window in windows for request in self.served(window)]
        met = sum(self.slo.is_met(one.ttft_s, one.tpot_s) for one in requests)
        return met / max(len(requests), 1)

    def most_density(self, windows: Sequence[Sequence[Arrival]], seconds: float) -> float:
        """The largest at which the service keeps its promise with a tenth of it to spare, and a
        tenth of the misses allowed: what is measured then has more noise than what is predicted
        here.
        """
        careful = replace(
            self, slo=ServingSlo(0.9 * self.slo.ttft_s, 0.9 * self.slo.tpot_s, self.slo.share)
        )
        found = _DENSITIES[0]
        for density in _DENSITIES:
            drawn = [
                scaled(window, density, seconds, place) for place, window in enumerate(windows)
            ]
            if careful.attainment(drawn) < 1.0 - (1.0 - self.slo.share) / 10:
                break
            found = density
        return found
