"""One job's rollout step: its turns, its training, and how long the trainer waited for it."""

from dataclasses import dataclass, field

from slackwater.model.ids import JobId
from slackwater.model.instance import InstanceSpec


@dataclass(slots=True)
class RolloutStep:
    """A job's current or last step; `base_models` are those of all its turns."""

    job: JobId
    number: int = 0
    running: bool = False
    seeding: bool = False  # local engines may run its turns
    live_turns: int = 0
    turns: int = 0
    expected_turns: int = 1
    announced: bool = False  # the driver set `expected_turns`; else it is guessed
    tokens: int = 0
    trained_tokens: int = 0
    train_s: float = 0.0
    waited_s: float = 0.0
    waits_since_s: float | None = None
    last_response_s: float = 0.0
    trains: bool = False  # a trainer has worked for it: an optim_step will end the step
    job_ended: bool = False
    base_models: set[str] = field(default_factory=set)

    def can_use(self, spec: InstanceSpec) -> bool:
        """Whether the engine can run its turns."""
        return spec.serves_any(self.job, self.base_models)

    def begin(self) -> None:
        """Begin the next step with the turns that are live."""
        self.number += 1
        self.running = True
        self.turns, self.tokens, self.trained_tokens = self.live_turns, 0, 0
        self.train_s = self.waited_s = 0.0

    def is_idle(self) -> bool:
        """Whether neither turns nor training are left to end it: the next turn begins another."""
        return self.running and not (self.live_turns or self.seeding or self.trains)

    def can_forget(self) -> bool:
        """Whether no state would be lost with it."""
        if self.live_turns or self.seeding:
            return False
        return self.job_ended or not (self.number or self.announced or self.trains)

    def training_tokens(self) -> int:
        """Tokens trained on as reported, else those that arrived before training began."""
        if self.trained_tokens:
            return self.trained_tokens
        return self.tokens if self.train_s else 0

    def end_wait(self, now_s: float) -> None:
        """The trainer no longer waits."""
        if self.waits_since_s is not None:
            self.waited_s += now_s - self.waits_since_s
            self.waits_since_s = None
