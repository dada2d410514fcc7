"""How many of a service's requests got what was promised."""

from slackwater.engine.coserving.token_times import ServedTimes
from slackwater.model.serving import ServingSlo


class SloCounts:
    """Counted since the start; the control plane makes minutes of it."""

    def __init__(self, slo: ServingSlo) -> None:
        self._slo = slo
        self._requests = self._met = 0

    def count(self, times: ServedTimes) -> None:
        """A request has ended."""
        self._requests += 1
        self._met += self._slo.met(times.ttft_s, times.tpot_s)

    def gauges(self) -> dict[str, float]:
        return {"slo_requests": float(self._requests), "slo_met": float(self._met)}
