"""The clients in a storm: multi-turn trajectories, bad turns, deadlines and changes of mind."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from slackwater.control.rollout.commands import CompleteTurn, FailTurn
from slackwater.control.rollout.events import TurnCancelled, TurnSubmitted
from slackwater.model.ids import JobId, TrajectoryId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import FinishReason, TurnSpec
from slackwater.sim.rollout.storm_instance import true_token

if TYPE_CHECKING:
    from benchmarks.rollout.storm import Storm

TRAJECTORIES = 16
MAX_TOKENS = 48
JOB = JobId("job")


class StormClients:
    """Keeps `TRAJECTORIES` conversations going, and compares every answer with the truth."""

    def __init__(self, storm: "Storm") -> None:
        self._storm = storm
        self._specs: dict[TurnId, TurnSpec] = {}
        self._hidden: dict[TurnId, int] = {}
        self._bad: set[TurnId] = set()
        self._then: dict[TurnId, Callable[[], None]] = {}
        self._number = 0

    def start(self) -> None:
        for number in range(TRAJECTORIES):
            trajectory = TrajectoryId(f"c{number}")
            self._storm.after(self._storm.wait_s(5.0), partial(self._converse, trajectory))

    def is_bad(self, turn: TurnId) -> bool:
        return turn in self._bad

    def hidden_tokens(self, turn: TurnId) -> int:
        """How many tokens the turn will have in the end."""
        return min(self._hidden[turn], MAX_TOKENS)

    def reason(self, turn: TurnId) -> FinishReason:
        stops = self._hidden[turn] <= MAX_TOKENS
        return FinishReason.STOP if stops else FinishReason.LENGTH

    def _converse(self, trajectory: TrajectoryId) -> None:
        """The next turn; when it is over the environment answers after a while, and so on."""
        storm = self._storm
        if not storm.raging:
            return
        stale = storm.version > 1 and storm.chance(0.2)
        versions = (f"v{storm.version}", f"v{storm.version - 1}")[: 1 + stale]

        def answer() -> None:
            storm.after(storm.wait_s(20.0), partial(self._converse, trajectory))

        self.ask(trajectory, JOB, versions, answer)

    def ask(
        self,
        trajectory: TrajectoryId,
        job: JobId,
        versions: tuple[str, ...],
        then: Callable[[], None],
        base_model: str = "",
    ) -> None:
        """Submit a turn that may be made with the first version or those after it; `then` when it
        has ended.

        Without a base model it is of one that is called as its job.
        """
        storm = self._storm
        self._number += 1
        turn = TurnId(f"t{self._number}")
        self._hidden[turn] = 1 + int(storm.rng.geometric(1 / 20))
        spec = TurnSpec(
            turn,
            trajectory,
            job,
            tuple(range(int(storm.rng.integers(1, 100)))),
            Sampling(max_tokens=MAX_TOKENS, seed=self._number),
            versions[0],
            also_versions=versions[1:],
            deadline_s=storm.now_s + 60 if storm.chance(0.05) else None,
            base_model=base_model or job,
        )
        self._specs[turn] = spec
        self._then[turn] = then
        if storm.chance(0.03):
            self._bad.add(turn)
        if storm.chance(0.03):
            storm.after(storm.wait_s(10.0), partial(self._cancel, turn))
        storm.happen(TurnSubmitted(storm.now_s, spec))
        if storm.chance(0.02):
            storm.happen(TurnSubmitted(storm.now_s, spec))  # sent twice

    def _cancel(self, turn: TurnId) -> None:
        if self._specs.pop(turn, None) is not None:
            self._storm.happen(TurnCancelled(self._storm.now_s, turn))
            self._then.pop(turn)()

    def completed(self, command: CompleteTurn) -> None:
        """Exactly the true tokens, exactly once."""
        turn = command.turn
        assert turn in self._specs, f"{turn} ended twice, or after it was cancelled"
        spec = self._specs.pop(turn)
        allowed = (spec.version, *spec.also_versions)
        assert command.version in allowed, f"{turn} made with {command.version}, not {allowed}"
        assert len(command.tokens) == self.hidden_tokens(turn), f"{turn}: wrong number of tokens"
        for position, token in enumerate(command.tokens):
            truths = {true_token(turn, version, position) for version in allowed}
            assert token in truths, f"{turn}: token {position} is {token}, not one of {truths}"
        assert command.reason is self.reason(turn), f"{turn} ended by {command.reason}"
        self._then.pop(turn)()

    def failed(self, command: FailTurn) -> None:
        """Only for a reason that the storm gave."""
        turn = command.turn
        assert turn in self._specs, f"{turn} ended twice"
        del self._specs[turn]
        known = ("deadline passed", "in a row without a token", "refused")
        name_failing_event = turn in self._bad or any(text in command.error for text in known)
        assert name_failing_event, f"{turn} failed without a cause: {command.error}"
        self._then.pop(turn)()
