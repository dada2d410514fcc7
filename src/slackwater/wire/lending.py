"""Messages about a serving worker that lends its device."""

from typing import TypeAlias

from slackwater.wire.frames import Message


class LendTo(Message, frozen=True):
    """Load this model beside the service's and join as an instance that the job borrows."""

    job: str
    base: str
    base_version: str
    model: str


class TakeBack(Message, frozen=True):
    """The rollout leaves at once; answered by `LoanOver`."""

    reason: str


class LentStepBegan(Message, frozen=True):
    """The borrower's next RL step begins: reset its KV budget and send `BudgetReport`."""


class LoanOver(Message, frozen=True):
    """Nothing of the rollout is left on the device; `error` if it failed or left by itself."""

    error: str = ""


class BudgetReport(Message, frozen=True):
    """A borrowed instance may hold another amount from now on."""

    max_running: int
    kv_tokens: int


ToLender: TypeAlias = LendTo | TakeBack | LentStepBegan
FromLender: TypeAlias = LoanOver | BudgetReport
