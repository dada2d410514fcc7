"""Ways to lend a serving device, by name: `foresight` (the default), and the baselines: those of
ROSE 6.2, and `multiplex`, which treats both kinds of requests alike.
"""

from dataclasses import dataclass
from typing import Literal

from slackwater.model.errors import ConfigError
from slackwater.policy.serving.admission import (
    AdmissionRule,
    AlternateSteps,
    Foresight,
    NoLending,
    SlackGate,
)

MemoryRule = Literal["none", "static", "preemptive"]


@dataclass(frozen=True, slots=True)
class LendingMode:
    """How memory and compute are shared.

    A mode that `stops` lends nothing while the service misses its SLO (`overload.py`). One that
    `foresees` also lends nothing while the service would miss it if each prompt took longer
    (`prompt_queue.py`). Prefixes of a rollout's finished turns stay cached for `lease_s`, and
    longer until the memory is needed; 0 keeps none (ROSE 4.1, appendix C).
    """

    name: str
    memory: MemoryRule
    admission: AdmissionRule
    lease_s: float = 10.0
    stops: bool = False
    foresees: bool = False

    @property
    def lends(self) -> bool:
        return self.memory != "none"


MODES: dict[str, LendingMode] = {
    mode.name: mode
    for mode in (
        LendingMode("none", "none", NoLending(), lease_s=0.0),
        LendingMode("static", "static", AlternateSteps(), lease_s=0.0),
        LendingMode("preempt", "preemptive", AlternateSteps(), lease_s=0.0),
        LendingMode("prefix", "preemptive", AlternateSteps()),
        LendingMode("ttft", "preemptive", SlackGate(tpot=False)),
        LendingMode("tpot", "preemptive", SlackGate(ttft=False)),
        LendingMode("dual", "preemptive", SlackGate(), stops=True),
        LendingMode("multiplex", "preemptive", AlternateSteps(chunk_tokens=8192), lease_s=0.0),
        LendingMode("foresight", "preemptive", Foresight(), stops=True, foresees=True),
    )
}


_FORMER_NAMES = {"ours": "foresight"}  # before 0.2; goes in 0.3


def find_mode(name: str) -> LendingMode:
    name = _FORMER_NAMES.get(name, name)
    if name not in MODES:
        raise ConfigError.of("mode", name, f"must be one of: {', '.join(MODES)}")
    return MODES[name]
