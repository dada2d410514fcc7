"""Placement policies by the names that configuration files and scenarios use."""

from collections.abc import Callable, Mapping
from typing import Literal

from slackwater.model.errors import ConfigError
from slackwater.policy.columns import MAX_MEMBERS
from slackwater.policy.placement.by_size import PlacementBySize
from slackwater.policy.placement.dedicated import CoLocated, SoloDisaggregated
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.group_packing import GroupPlacement
from slackwater.policy.placement.grouped import GroupedPlacement
from slackwater.policy.placement.horizon import HorizonPlacement
from slackwater.policy.placement.interface import PlacementPolicy
from slackwater.policy.placement.interleaving import Interleaving
from slackwater.policy.placement.job_fractions import JobFractions
from slackwater.policy.placement.naive import MostIdlePlacement, RandomPlacement
from slackwater.policy.placement.regrouping import Regrouping


class Options:
    """The options of one policy. The policy takes out those that it knows; the rest is an error."""

    def __init__(self, policy: str, given: Mapping[str, float]) -> None:
        self._policy = policy
        self._given = dict(given)
        self._known: list[str] = []

    def take_number(self, name: str, default: float) -> float:
        self._known.append(name)
        return self._given.pop(name, default)

    def take_integer(self, name: str, default: int) -> int:
        """Take out an option that must be a whole number."""
        value = self.take_number(name, default)
        if value != int(value):
            raise ConfigError.of(f"policy options: {name}", value, "must be a whole number")
        return int(value)

    def take_flag(self, name: str) -> bool:
        """Take out an option that is 0 (the default) or 1."""
        return bool(self.take_integer(name, 0))

    @property
    def names(self) -> tuple[str, ...]:
        """The options that the policy knows."""
        return tuple(self._known)

    def refuse_unknown(self) -> None:
        """Raise an error if an option is left that the policy does not know."""
        for name, value in self._given.items():
            known = ", ".join(self._known) or "none"
            raise ConfigError.of(
                f"policy options: {name}", value, f"is no option of {self._policy}; it has: {known}"
            )


Maker = Callable[[FleetView, Options, int], GroupedPlacement]


def _max_size(options: Options) -> int:
    return options.take_integer("max_group_size", MAX_MEMBERS)


def _make_interleaving(fleet: FleetView, options: Options, seed: int) -> GroupedPlacement:
    del seed
    return Interleaving(fleet, _max_size(options))


def _make_group(fleet: FleetView, options: Options, seed: int) -> GroupedPlacement:
    del seed
    size = _max_size(options)
    return GroupPlacement(fleet, size, colocate=options.take_flag("colocate"))


def _make_regrouping(fleet: FleetView, options: Options, seed: int) -> GroupedPlacement:
    size = _max_size(options)
    every_s = options.take_number("every_s", 3600.0)
    orders, keep_slos = options.take_integer("orders", 24), options.take_flag("keep_slos")
    return Regrouping(fleet, size, every_s, orders, seed, keep_slos=keep_slos)


def _make_horizon(mode: Literal["pack", "spread"]) -> Maker:
    return lambda fleet, options, seed: HorizonPlacement(
        fleet,
        _max_size(options),
        mode,
        options.take_number("waiting_bound", 0.5),
        options.take_flag("cold_start"),
        options.take_flag("profiled"),
    )


# A maker gets the fleet, the options and the seed.
POLICIES: dict[str, Maker] = {
    "interleaving": _make_interleaving,
    "ours": _make_interleaving,  # its name before 0.2; goes in 0.3
    "group": _make_group,
    "horizon": _make_horizon("pack"),
    "pack": _make_horizon("pack"),
    "spread": _make_horizon("spread"),
    "spread_backfill": _make_horizon("spread"),
    "solo": lambda fleet, options, seed: SoloDisaggregated(fleet),
    "isolated": lambda fleet, options, seed: SoloDisaggregated(fleet),
    "colocated": lambda fleet, options, seed: CoLocated(
        fleet, keep_slos=options.take_flag("keep_slos")
    ),
    "gavel": lambda fleet, options, seed: JobFractions(fleet, _max_size(options)),
    "random": lambda fleet, options, seed: RandomPlacement(fleet, _max_size(options), seed),
    "most_idle": lambda fleet, options, seed: MostIdlePlacement(fleet, _max_size(options)),
    "regrouping": _make_regrouping,
}


def list_options(name: str, fleet: FleetView) -> tuple[str, ...]:
    asked = Options(name, {})
    _find_maker(name)(fleet, asked, 0)
    return asked.names


def make_policy(
    name: str, fleet: FleetView, options: Mapping[str, float] | None = None, seed: int = 0
) -> PlacementPolicy:
    """Create a policy for jobs of all sizes. `seed` is for policies that draw random numbers."""

    def make(view: FleetView) -> GroupedPlacement:
        given = Options(name, options or {})
        policy = _find_maker(name)(view, given, seed)
        given.refuse_unknown()
        return policy

    return PlacementBySize(fleet, make)


def _find_maker(name: str) -> Maker:
    if name not in POLICIES:
        raise ConfigError.of("policy.name", name, f"is none of: {', '.join(POLICIES)}")
    return POLICIES[name]
