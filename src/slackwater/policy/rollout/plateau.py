"""Learn the batch size at which an engine's throughput stops growing (RLBoost 4.2.1)."""

_WEIGHT = 0.2  # of a new observation
_ENOUGH = 0.9  # of the best rate


class ThroughputProfile:
    """The decode rate by batch size, in buckets of powers of two. A moving average follows the rate
    as contexts grow within a step.
    """

    def __init__(self) -> None:
        self._rate_by_bucket: dict[int, float] = {}

    def observe(self, batch: int, tokens_per_s: float) -> None:
        """Record that a batch of `batch` turns generated `tokens_per_s`."""
        if batch <= 0 or tokens_per_s <= 0:
            return
        bucket = batch.bit_length()
        seen = self._rate_by_bucket.get(bucket)
        self._rate_by_bucket[bucket] = (
            tokens_per_s if seen is None else seen + _WEIGHT * (tokens_per_s - seen)
        )

    def plateau(self) -> int | None:
        """The smallest batch with nearly the best rate; None until two buckets were measured."""
        if len(self._rate_by_bucket) < 2:
            return None
        wanted = _ENOUGH * max(self._rate_by_bucket.values())
        bucket = min(bucket for bucket, rate in self._rate_by_bucket.items() if rate >= wanted)
        return int(2**bucket * 0.75)  # the middle of [2^(b-1), 2^b)
