"""How a model is spread over ranks: tensor and data parallelism, for trainers and engines."""

from dataclasses import dataclass

from slackwater.model.device import layout_sizes
from slackwater.model.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """`tp * dp` ranks, numbered with tp fastest. With `fsdp` the dp ranks hold each tensor's rows
    in equal parts, as PyTorch's `fully_shard` does; without it they are replicas.
    """

    tp: int = 1
    dp: int = 1
    fsdp: bool = False

    @classmethod
    def parse(cls, text: str, field: str = "layout") -> "Layout":
        """`tp=2,dp=2`, as `str` writes it; the dp ranks of a deployment are sharded."""
        return cls(*layout_sizes(text, field), fsdp=True)

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "dp": self.dp}
        return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "tp=1"

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    def position(self, rank: int) -> tuple[int, int]:
        """A rank's index in the dimensions tp and dp."""
        if not 0 <= rank < self.ranks:
            raise ConfigError.of("rank", rank, f"must be below {self.ranks}")
        return rank % self.tp, rank // self.tp
