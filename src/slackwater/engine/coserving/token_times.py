"""When the service's requests came, had their first token, and must have the next."""

from dataclasses import dataclass

from slackwater.engine.request import StepOutput
from slackwater.engine.scheduler import EngineLoad
from slackwater.policy.serving.slack import NO_LIMIT_S, QueuedPrompt, ServingState


@dataclass(frozen=True, slots=True)
class ServedTimes:
    """One request that is done: how long its first token took, and each one after it on average."""

    request_id: int
    ttft_s: float
    tpot_s: float


@dataclass(slots=True)
class _Times:
    arrival_s: float
    first_s: float = NO_LIMIT_S
    tokens: int = 0


class TokenTimes:
    """Follows the service's requests through their steps."""

    def __init__(self, tpot_s: float) -> None:
        self._tpot_s = tpot_s
        self._times: dict[int, _Times] = {}
        self._decoding: dict[int, float] = {}
        self._last_step_s = NO_LIMIT_S

    def arrived(self, request_id: int, now_s: float) -> None:
        self._times[request_id] = _Times(now_s)

    def aborted(self, request_id: int) -> None:
        self._times.pop(request_id, None)
        self._decoding.pop(request_id, None)

    def stepped(self, output: StepOutput, now_s: float) -> tuple[list[float], list[ServedTimes]]:
        """A step of the service gave these tokens: TTFT of first ones, requests that ended."""
        self._last_step_s = now_s
        first_s: list[float] = []
        for request_id in output.request_ids.tolist():
            times = self._times.get(request_id)
            if times is None:
                continue
            times.tokens += 1
            if times.tokens == 1:
                times.first_s = now_s
                first_s.append(now_s - times.arrival_s)
            self._decoding[request_id] = times.first_s + self._tpot_s * times.tokens
        ended = [one.request_id for one in output.finished]
        ended += [one.request_id for one in output.failed]
        done: list[ServedTimes] = []
        for request_id in ended:
            self._decoding.pop(request_id, None)
            times = self._times.pop(request_id, None)
            if times is not None and times.tokens:
                tpot_s = (now_s - times.first_s) / max(times.tokens - 1, 1)
                done.append(ServedTimes(request_id, times.first_s - times.arrival_s, tpot_s))
        return first_s, done

    def under_way(self, now_s: float) -> list[ServedTimes]:
        """Requests that have not ended; one without a first token waits for it since it came."""
        return [
            ServedTimes(
                request_id,
                (times.first_s if times.tokens else now_s) - times.arrival_s,
                (self._last_step_s - times.first_s) / max(times.tokens - 1, 1)
                if times.tokens
                else 0.0,
            )
            for request_id, times in self._times.items()
        ]

    def state(self, load: EngineLoad) -> ServingState:
        """As the arbiter sees it."""
        queued = []
        for request_id, tokens, computed in load.prompts:
            times = self._times.get(request_id)
            # One that was preempted has had its first token: its promise now is the next one.
            arrival_s = NO_LIMIT_S if times is None or times.tokens else times.arrival_s
            queued.append(QueuedPrompt(arrival_s, tokens, computed))
        return ServingState(
            queued,
            load.decoding,
            load.context,
            self._last_step_s if load.decoding else NO_LIMIT_S,
            min(self._decoding.values(), default=NO_LIMIT_S),
        )
