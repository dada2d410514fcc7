"""How a model is spread over ranks: tensor, pipeline, expert and data parallel, on either side."""

from dataclasses import dataclass

from slackwater.model.errors import ConfigError


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
    `vocab_multiple * tp` rows.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    fused: bool = False
    vocab_multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "dp", "vocab_multiple"):
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
