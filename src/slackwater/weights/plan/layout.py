"""How a model is spread over ranks: tensor, pipeline, expert and data parallel, on either side."""

from dataclasses import dataclass

from slackwater.model.errors import ConfigError

_SIZES = ("tp", "pp", "ep", "dp")


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank stands in each direction."""

    tp: int
    pp: int
    ep: int
    dp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """`tp * pp * dp` ranks, numbered with tp fastest, then dp, then pp.

    With `ep` above 1 each expert is whole on one of every `ep` neighbouring ranks of a stage; with
    1 the experts are cut like dense layers. `fused` ranks hold q, k, v as one tensor, gate and up
    as one, and a layer's experts stacked. The vocabulary is filled up to a multiple of
    `vocab_multiple * tp` rows; with 0 it is not, and the last rank has fewer. With `fsdp` the dp
    ranks hold each tensor's rows in equal parts, as PyTorch's `fully_shard` does; without it they
    are replicas.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    fused: bool = False
    vocab_multiple: int = 1
    fsdp: bool = False

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """`tp=2,dp=2`, as `str` writes it; the dp ranks of a deployment are sharded."""
        sizes: dict[str, int] = {}
        for part in filter(None, text.split(",")):
            name, _, size = part.partition("=")
            if name not in _SIZES or name in sizes or not size.isdecimal():
                raise ConfigError.of("layout", text, "must be sizes such as tp=2,dp=2")
            sizes[name] = int(size)
        tp, pp, ep, dp = (sizes.get(name, 1) for name in _SIZES)
        return cls(tp, pp, ep, dp, fsdp=True, vocab_multiple=0)

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in _SIZES}
        return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "tp=1"

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ConfigError.of(f"layout {name}", getattr(self, name), "must be 1 or more")
        if (self.tp * self.dp) % self.ep:
            raise ConfigError.of("layout ep", self.ep, f"must divide tp * dp = {self.tp * self.dp}")

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def place(self, rank: int) -> RankPosition:
        """Where a rank stands."""
        if not 0 <= rank < self.ranks:
            raise ConfigError.of("rank", rank, f"must be below {self.ranks}")
        within, pp = rank % (self.tp * self.dp), rank // (self.tp * self.dp)
        return RankPosition(within % self.tp, pp, within % self.ep, within // self.tp)

    def stage_layers(self, layers: int, stage: int) -> range:
        """The layers of a pipeline stage: as even as can be, the first stages having one more."""
        if layers < self.pp:
            raise ConfigError.of("layout pp", self.pp, f"must be at most the {layers} layers")
        each, more = divmod(layers, self.pp)
        first = stage * each + min(stage, more)
        return range(first, first + each + (stage < more))
