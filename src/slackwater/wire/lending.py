"""Messages to and from a serving worker that lends its device."""

from typing import TypeAlias

from slackwater.model.ids import WorkerId
from slackwater.wire.frames import Message


def loan_name(lender: str, number: int) -> WorkerId:
    """The name under which the engine of a serving worker's loan connects."""
    return WorkerId(f"{lender}~{number}")


def lender_of(worker: str) -> WorkerId:
    """The serving worker of a loan's engine; any other worker itself."""
    return WorkerId(worker.partition("~")[0])


def is_loan(worker: str) -> bool:
    return "~" in worker


class LendNode(Message, frozen=True, tag="LendTo"):
    """Load this model beside the service's, and join as an instance that the job borrows."""

    job: str
    base: str
    base_version: str
    model: str


class ReclaimNode(Message, frozen=True, tag="TakeBack"):
    """End the loan at once; answered by `LoanEnded`."""

    reason: str


class BeginStep(Message, frozen=True, tag="LentStepBegan"):
    """The borrower's next RL step begins: reset its KV budget and send `BudgetReport`."""


class LoanEnded(Message, frozen=True, tag="LoanOver"):
    """The rollout has left the device; `error` if the loan failed or ended by itself."""

    error: str = ""


class BudgetReport(Message, frozen=True):
    """The new capacity of a borrowed instance."""

    max_running: int
    kv_tokens: int


ToLender: TypeAlias = LendNode | ReclaimNode | BeginStep
FromLender: TypeAlias = LoanEnded | BudgetReport
