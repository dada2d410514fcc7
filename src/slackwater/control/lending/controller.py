"""Lending as a component: the rule when a job wants a loan, and the lender that gives it."""

from collections.abc import Collection, Sequence

from slackwater.control.lending.commands import LendingCommand
from slackwater.control.lending.demand import LoanDemand
from slackwater.control.lending.lender import Lender, LenderSettings
from slackwater.control.lending.messages import LoanEvent


class LendingController:
    """Rollouts of the `lendable` base models borrow the nodes of services."""

    def __init__(self, lendable: Collection[str], settings: LenderSettings | None = None) -> None:
        self.lender = Lender(settings)
        self._demand = LoanDemand(lendable)

    def handle(self, event: LoanEvent) -> Sequence[LendingCommand]:
        """Take one event; return what is to be done, in order."""
        out: list[LendingCommand] = []
        for each in self._demand.translate(event):
            out += self.lender.handle(each)
        return out

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        self.lender.check_integrity()
        self._demand.check_integrity()
