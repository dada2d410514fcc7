"""What goes wrong with single engines of a simulated fleet: they die, are to leave, are drained,
stall, refuse turns, lose room and report what is not so.
"""

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.rollout.false_reports import FalseReport, false_report
from slackwater.control.rollout import events as on
from slackwater.model.instance import InstanceKind
from slackwater.sim.rollout.storm_instance import StormInstance

if TYPE_CHECKING:
    from slackwater.sim.fleet.fleet import SimulatedFleet

_NOTICE_S = 30.0


class EngineFaults:
    """Strikes one engine at random, one of those that can be heard."""

    def __init__(self, fleet: "SimulatedFleet") -> None:
        self._fleet = fleet

    def strike(self) -> None:
        """One kind of trouble."""
        if (victim := self._pick()) is not None:
            troubles = (
                *(self._kill, self._notice, self._drain, self._stall, self._refuse),
                self._change_budget,
            )
            troubles[int(self._fleet.rng.integers(len(troubles)))](victim)

    def lie(self) -> None:
        """It reports what is not so."""
        fleet, victim = self._fleet, self._pick()
        if victim is not None and victim.requests:
            kinds = tuple(FalseReport)
            attempt, request = next(iter(victim.requests.items()))
            ending = fleet.engines.ending(victim, request)
            kind = kinds[int(fleet.rng.integers(len(kinds)))]
            fleet.tell(false_report(kind, ending, attempt, request))

    def _pick(self) -> StormInstance | None:
        fleet, engines = self._fleet, self._fleet.engines
        heard = [
            name for name in sorted(engines.living) if not fleet.silent_s(engines.node_of[name])
        ]
        return engines.living[heard[int(fleet.rng.integers(len(heard)))]] if heard else None

    def _kill(self, victim: StormInstance) -> None:
        if self._fleet.engines.lives(victim):
            self._fleet.engines.lose(victim.instance, "killed")

    def _notice(self, victim: StormInstance) -> None:
        """It goes at its time, whether its turns have left it or not."""
        fleet = self._fleet
        fleet.tell(on.InstanceNotice(fleet.now_s, victim.instance, fleet.now_s + _NOTICE_S))
        fleet.after(_NOTICE_S, partial(self._kill, victim))

    def _drain(self, victim: StormInstance) -> None:
        fleet = self._fleet
        fleet.tell(on.DrainRequested(fleet.now_s, victim.instance, move_turns=fleet.chance(0.5)))

    def _stall(self, victim: StormInstance) -> None:
        """Short of the limit, or beyond."""
        victim.stalled_until_s = self._fleet.now_s + self._fleet.wait_s(200.0)
        victim.says_stalled = self._fleet.chance(0.5)

    def _refuse(self, victim: StormInstance) -> None:
        victim.refuses_until_s = self._fleet.now_s + self._fleet.wait_s(60.0)

    def _change_budget(self, victim: StormInstance) -> None:
        fleet, spec = self._fleet, victim.spec
        if spec.kind is InstanceKind.BORROWED:
            running = int(fleet.rng.integers(0, spec.max_running + 1))
            kv_tokens = int(fleet.rng.integers(0, spec.kv_tokens + 1))
            fleet.tell(on.BudgetChanged(fleet.now_s, victim.instance, running, kv_tokens))
