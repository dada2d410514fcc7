"""Settings of the operations controller."""

from dataclasses import dataclass

from slackwater.model.errors import ConfigError, check_above_zero, check_not_negative


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

    def __post_init__(self) -> None:
        times = ("give_up_gap_after_s", "give_up_move_after_s", "save_log_after_s")
        check_above_zero("operations: ", self, *times, "max_attempts", "max_waiting_per_model")
        check_not_negative("operations: ", self, "max_skipped")
        if not 0 <= self.snapshot_share <= 1:
            fix = "must be from 0 to 1"
            raise ConfigError.of("operations: snapshot_share", self.snapshot_share, fix)
