"""What goes wrong in a storm, and how often."""

from typing import TYPE_CHECKING

from benchmarks.rollout.false_reports import FalseReport, TroubledInstance, false_report
from slackwater.control.rollout import events as ev
from slackwater.control.weights.events import WeightsRetired
from slackwater.model.instance import InstanceKind

if TYPE_CHECKING:
    from benchmarks.rollout.storm import Storm

FLEET = 5


class StormFaults:
    """Schedules one kind of trouble after another, at random."""

    def __init__(self, storm: "Storm") -> None:
        self._storm = storm

    def start(self) -> None:
        storm = self._storm
        storm.after(storm.wait_s(60.0), self._trouble)
        storm.after(storm.wait_s(600.0), self._publish)

    def _publish(self) -> None:
        storm = self._storm
        if storm.raging:
            storm.publish()
            if storm.version > 3:
                storm.happen(WeightsRetired(storm.now_s, f"v{storm.version - 3}"))
            storm.after(storm.wait_s(600.0), self._publish)

    def _trouble(self) -> None:
        storm = self._storm
        if not storm.raging:
            return
        living = list(storm.instances.values())
        if len(living) < FLEET or storm.chance(0.1):
            storm.join()
        elif living:
            victim = living[int(storm.rng.integers(len(living)))]
            troubles = (
                self._kill,
                self._kill,
                self._kill_all,
                self._notice,
                self._drain,
                self._freeze,
                self._stall,
                self._refuse,
                self._cut,
                self._lie,
            )
            troubles[int(storm.rng.integers(len(troubles)))](victim)
        storm.after(storm.wait_s(25.0), self._trouble)

    def _kill(self, victim: TroubledInstance) -> None:
        storm = self._storm
        if storm.instances.pop(victim.instance, None) is not None:
            storm.happen(ev.InstanceLost(storm.now_s, victim.instance, "killed"))

    def _kill_all(self, victim: TroubledInstance) -> None:
        """A zone goes; seldom."""
        if self._storm.chance(0.2):
            for instance in list(self._storm.instances.values()):
                self._kill(instance)
        else:
            self._kill(victim)

    def _notice(self, victim: TroubledInstance) -> None:
        storm = self._storm
        storm.happen(ev.InstanceNotice(storm.now_s, victim.instance, storm.now_s + 30))
        storm.after(30.0, lambda: self._kill(victim) if storm.lives(victim) else None)

    def _drain(self, victim: TroubledInstance) -> None:
        storm = self._storm
        storm.happen(ev.DrainRequested(storm.now_s, victim.instance, move_turns=storm.chance(0.5)))

    def _freeze(self, victim: TroubledInstance) -> None:
        """Silence: short of the lease or beyond it; the frames come late."""
        victim.frozen_until_s = self._storm.now_s + self._storm.wait_s(12.0)

    def _stall(self, victim: TroubledInstance) -> None:
        victim.stalled_until_s = self._storm.now_s + self._storm.wait_s(20.0)
        victim.says_stalled = self._storm.chance(0.5)

    def _refuse(self, victim: TroubledInstance) -> None:
        victim.refuses_until_s = self._storm.now_s + self._storm.wait_s(10.0)

    def _cut(self, victim: TroubledInstance) -> None:
        storm = self._storm
        if victim.spec.kind is not InstanceKind.BORROWED:
            return
        running = int(storm.rng.integers(0, victim.spec.max_running + 1))
        kv_tokens = int(storm.rng.integers(0, victim.spec.kv_tokens + 1))
        storm.happen(ev.BudgetChanged(storm.now_s, victim.instance, running, kv_tokens))

    def _lie(self, victim: TroubledInstance) -> None:
        lies = tuple(FalseReport)
        victim.lie = lies[int(self._storm.rng.integers(len(lies)))]

    def tell(self, instance: TroubledInstance, lie: FalseReport) -> None:
        """Tell the lie about the instance's first request."""
        attempt, request = next(iter(instance.requests.items()))
        ending = self._storm.ending(instance, request)
        self._storm.happen(false_report(lie, ending, attempt, request))
