"""What every bench is given."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slackwater.model.errors import ConfigError
from slackwater.model.serving import ServingSlo


def _silent(what: str, share: float) -> None:
    del what, share


def _no_partial(cell: str, figures: Mapping[str, float]) -> None:
    del cell, figures


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What is replayed where. `speed` 2 sends two seconds of the trace in one; `duration_s` is of
    the wall's clock.
    """

    url: str
    key: str
    trace: Path
    slo: ServingSlo
    model: str | None = None
    speed: float = 1.0
    duration_s: float = 60.0
    from_s: float = 0.0
    most_prompt: int = 8192
    most_output: int = 1024

    def __post_init__(self) -> None:
        for name in ("speed", "duration_s", "most_prompt", "most_output"):
            if not 0 < getattr(self, name) < float("inf"):
                option = f"--{name.removesuffix('_s').replace('_', '-')}"
                raise ConfigError.of(option, getattr(self, name), "must be above 0")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`progress(what, share)` moves the bar; `quick` asks for a smaller run with the same keys;
    `before` is the source folder of an older version; `part` is the one part to measure, of a bench
    that names its `PARTS`; `duration_s` is how long a bench runs that says so, `runs` how often;
    `processes` is how many of its cells run at once, and `partial(cell, figures)` takes what one of
    them found. `record` is where a live run's record is kept. `replay` is for the bench of that
    name alone.
    """

    seed: int = 0
    quick: bool = False
    data: Path | None = None
    before: Path | None = None
    part: str | None = None
    duration_s: float | None = None
    runs: int | None = None
    record: Path | None = None
    processes: int | None = None
    partial: Callable[[str, Mapping[str, float]], None] = _no_partial
    progress: Callable[[str, float], None] = _silent
    replay: ReplayOptions | None = None

    def wants(self, part: str) -> bool:
        """Whether this part is to be measured."""
        return self.part in (None, part)

    def data_file(self, relative: str) -> Path:
        """A public trace under `--data`, or an error that says how to bring it."""
        if self.data is None or not (self.data / relative).is_file():
            raise ConfigError.of(
                "--data", str(self.data), f"must be a folder that holds {relative}"
            )
        return self.data / relative
