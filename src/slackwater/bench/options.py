"""What every bench is given."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def _silent(what: str, share: float) -> None:
    del what, share


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`progress(what, share)` moves the bar; `quick` asks for a smaller run with the same keys."""

    seed: int = 0
    quick: bool = False
    data: Path | None = None
    progress: Callable[[str, float], None] = _silent

    def data_file(self, relative: str) -> Path:
        """A public trace under `--data`, or an error that says how to bring it."""
        from slackwater.model.errors import ConfigError

        if self.data is None or not (self.data / relative).is_file():
            raise ConfigError.of(
                "--data", str(self.data), f"must be a folder that holds {relative}"
            )
        return self.data / relative
