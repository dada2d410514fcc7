"""The cost of loading a job's state onto devices."""

from dataclasses import dataclass

from slackwater.model.errors import check_not_negative


@dataclass(frozen=True, slots=True)
class SwitchCosts:
    """Seconds by model size (WEAVE Figure 4: cold up to 135 s at 32B, warm 71.5 times faster).

    A warm switch, from host memory, is part of every declared phase, and saved if the state is on
    the devices. A cold switch, with new processes and communicators, precedes a job's first phase
    in a place.
    """

    warm_base_s: float = 0.0
    warm_s_per_billion: float = 0.06
    cold_base_s: float = 39.0
    cold_s_per_billion: float = 3.0

    def __post_init__(self) -> None:
        check_not_negative("switching: ", self, *self.__slots__)

    def warm_s(self, model_billions: float) -> float:
        """From host memory to the device."""
        return self.warm_base_s + self.warm_s_per_billion * model_billions

    def cold_s(self, model_billions: float) -> float:
        """With new processes."""
        return self.cold_base_s + self.cold_s_per_billion * model_billions
