"""Settings of the operations controller."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OperationsConfig:
    """`save_log_after_s` bounds the duration of a replay; snapshots take up to `snapshot_share` of
    the time. `max_skipped` is how far a number may be ahead of the next one. A move between nodes
    without a report is given up after `give_up_move_after_s`.
    """

    give_up_gap_after_s: float = 60.0
    give_up_move_after_s: float = 300.0
    save_log_after_s: float = 30.0
    snapshot_share: float = 0.1
    max_attempts: int = 5
    max_waiting_per_model: int = 1024
    max_skipped: int = 16_384
