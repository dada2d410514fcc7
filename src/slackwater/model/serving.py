"""SLOs of online services."""

from dataclasses import dataclass

from slackwater.model.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServingSlo:
    """`share` of the requests get their first token within `ttft_s` and at most `tpot_s` per token
    after it, on average over the request.
    """

    ttft_s: float
    tpot_s: float
    share: float = 0.99

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError.of(f"slo: {name}", getattr(self, name), "must be above 0")
        if not 0 < self.share < 1:
            raise ConfigError.of("slo: share", self.share, "must be between 0 and 1, such as 0.99")

    @classmethod
    def parse(cls, text: str) -> "ServingSlo":
        """From `ttft=0.5,tpot=0.15` in seconds, optionally with `share=0.99`."""
        fix = "must be like ttft=0.5,tpot=0.15 (seconds)"
        names = {"ttft": "ttft_s", "tpot": "tpot_s", "share": "share"}
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                found[names[name.strip()]] = float(value)
            except (KeyError, ValueError):
                raise ConfigError.of("--slo", text, fix) from None
        if not {"ttft_s", "tpot_s"} <= found.keys():
            raise ConfigError.of("--slo", text, fix)
        return cls(**found)

    def is_met(self, ttft_s: float, tpot_s: float) -> bool:
        return ttft_s <= self.ttft_s and tpot_s <= self.tpot_s
