"""Ways to lend a serving device, by name: the ladder of ROSE 6.2, a multiplexing peer, and
`foresight`, the default.
"""

from dataclasses import dataclass, field
from typing import Literal

from slackwater.model.errors import ConfigError
from slackwater.policy.serving.admission import (
    AdmissionRule,
    AlternateSteps,
    Foresight,
    NoLending,
    SlackGate,
)
from slackwater.policy.serving.kv_budget import KvBudgetRule
from slackwater.policy.serving.prefix_lease import PrefixLease

MemoryRule = Literal["none", "static", "preemptive"]


@dataclass(frozen=True, slots=True)
class LendingMode:
    """Whose memory, which prefixes stay, who computes. One that `stops` lends nothing while the
    service breaks its promise (`overload.py`), one that `foresees` neither while the service would
    break it if each prompt took `stretch` times as long (`prompt_queue.py`).
    """

    name: str
    memory: MemoryRule
    admission: AdmissionRule
    lease: PrefixLease = field(default_factory=PrefixLease)
    budget: KvBudgetRule = field(default_factory=KvBudgetRule)
    stops: bool = False
    foresees: bool = False
    stretch: float = 1.3

    @property
    def lends(self) -> bool:
        return self.memory != "none"


_NO_PREFIXES = PrefixLease(0.0)
MODES: dict[str, LendingMode] = {
    mode.name: mode
    for mode in (
        LendingMode("none", "none", NoLending(), _NO_PREFIXES),
        LendingMode("static", "static", AlternateSteps(), _NO_PREFIXES),
        LendingMode("preempt", "preemptive", AlternateSteps(), _NO_PREFIXES),
        LendingMode("prefix", "preemptive", AlternateSteps()),
        LendingMode("ttft", "preemptive", SlackGate(tpot=False)),
        LendingMode("tpot", "preemptive", SlackGate(ttft=False)),
        LendingMode("dual", "preemptive", SlackGate(), stops=True),
        LendingMode("multiplex", "preemptive", AlternateSteps(chunk_tokens=8192), _NO_PREFIXES),
        LendingMode("foresight", "preemptive", Foresight(), stops=True, foresees=True),
    )
}


_FORMER_NAMES = {"ours": "foresight"}  # before 0.2; goes in 0.3


def mode_of(name: str) -> LendingMode:
    """A mode by its name."""
    name = _FORMER_NAMES.get(name, name)
    if name not in MODES:
        raise ConfigError.of("mode", name, f"must be one of: {', '.join(MODES)}")
    return MODES[name]
