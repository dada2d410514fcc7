"""What one mode of co-serving made of the windows of a trace, some of which may hold no request."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slackwater.engine.coserving.executor import RequestLatency
from slackwater.model.serving import ServingSlo

SLO = ServingSlo(0.5, 0.15)


@dataclass(frozen=True, slots=True)
class Played:
    """One window of one mode: every request that came in it, done or not, and what was
    rolled out. `needed_s` is the time that the service could not have done with less of.
    """

    times: list[RequestLatency]
    seconds: float
    serving_s: float
    needed_s: float
    rollout_tokens: int
    given_back: int
    cuts: int
    stopped_s: float

    @property
    def free_s(self) -> float:
        """What the promise leaves free of the window."""
        return max(self.seconds - self.needed_s, 1e-3 * self.seconds)

    @property
    def met(self) -> int:
        return sum(SLO.is_met(one.ttft_s, one.tpot_s) for one in self.times)


def pooled(plays: Sequence[Played], kept: Sequence[Played], alone: float) -> dict[str, float]:
    """Windows of one mode together, against the same windows without lending; `_least` and `_most`
    by window. `harvest` is rollout tokens over those of a device that only rolls out, for as long
    as the promise leaves it free.
    """
    times = [one for play in plays for one in play.times]
    seconds = sum(play.seconds for play in plays)
    lost = [
        100.0 * (_attainment([none]) - _attainment([play]))
        for play, none in zip(plays, kept, strict=True)
    ]
    made = sum(play.rollout_tokens for play in plays)
    harvests = [
        play.rollout_tokens / (none.free_s * alone) for play, none in zip(plays, kept, strict=True)
    ]
    kept_share, met_share = _attainment(kept), _attainment(plays)
    return {
        "windows": float(len(plays)),
        "requests": float(len(times)),
        "attainment": met_share,
        "attainment_lost_points": 100.0 * (kept_share - met_share),
        "attainment_lost_points_most": max(lost),
        "ttft_p50_ms": _quantile_ms([one.ttft_s for one in times], 0.5),
        "ttft_p99_ms": _quantile_ms([one.ttft_s for one in times], 0.99),
        "tpot_p99_ms": _quantile_ms([one.tpot_s for one in times], 0.99),
        "serving_share": sum(play.serving_s for play in plays) / seconds,
        "stopped_share": sum(play.stopped_s for play in plays) / seconds,
        "rollout_tokens_per_s": made / seconds,
        "over_alone": made / seconds / alone,
        "harvest": made / (sum(none.free_s for none in kept) * alone),
        "harvest_least": min(harvests),
        "harvest_most": max(harvests),
        "given_back": float(sum(play.given_back for play in plays)),
        "cuts": float(sum(play.cuts for play in plays)),
    }


def _attainment(plays: Sequence[Played]) -> float:
    """The share of requests that were kept to; all of them where none came."""
    requests = sum(len(play.times) for play in plays)
    return sum(play.met for play in plays) / requests if requests else 1.0


def _quantile_ms(seconds: Sequence[float], share: float) -> float:
    """0 where no request came in the window."""
    return 1e3 * float(np.quantile(seconds, share)) if seconds else 0.0
