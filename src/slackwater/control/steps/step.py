"""One job's step: its turns, its training, and what was waited for."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from slackwater.model.ids import JobId
from slackwater.model.instance import InstanceSpec


@dataclass(slots=True)
class RolloutStep:
    """A job's present or last step; `base_models` are those of all its turns."""

    job: JobId
    number: int = 0
    running: bool = False
    seeding: bool = False
    live_turns: int = 0
    turns: int = 0
    expected_turns: int = 1
    announced: bool = False  # `expected_turns` was said, not guessed from the step before
    tokens: int = 0
    trained_tokens: int = 0
    train_s: float = 0.0
    waited_s: float = 0.0
    waits_since_s: float | None = None
    last_response_s: float = 0.0
    trains: bool = False  # a trainer has worked for it: an optim_step will end the step
    over: bool = False  # the job is: forget the step with its last turn
    base_models: set[str] = field(default_factory=set)

    def uses(self, spec: InstanceSpec) -> bool:
        """Whether the engine can take its turns."""
        return spec.serves_any(self.job, self.base_models)

    def begin(self) -> None:
        """The next one, with the turns that are live."""
        self.number += 1
        self.running = True
        self.turns, self.tokens, self.trained_tokens = self.live_turns, 0, 0
        self.train_s = self.waited_s = 0.0

    def idle(self) -> bool:
        """Whether it has no turn and no training to end it: the next turn begins another."""
        return self.running and not (self.live_turns or self.seeding or self.trains)

    def forgettable(self) -> bool:
        """Whether nothing would be lost with it."""
        if self.live_turns or self.seeding:
            return False
        return self.over or not (self.number or self.announced or self.trains)

    def trained(self) -> int:
        """Tokens trained on as reported, else those that arrived before training began."""
        if self.trained_tokens:
            return self.trained_tokens
        return self.tokens if self.train_s else 0

    def end_wait(self, now_s: float) -> None:
        """The trainer waits no more."""
        if self.waits_since_s is not None:
            self.waited_s += now_s - self.waits_since_s
            self.waits_since_s = None


def users(steps: Iterable[RolloutStep], spec: InstanceSpec) -> list[RolloutStep]:
    """The steps that seed on the engine now."""
    return [step for step in steps if step.seeding and step.uses(spec)]
