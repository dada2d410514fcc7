"""Serving nodes of a simulated fleet: they report what they use, lend, and take back."""

from typing import Protocol, TypeAlias

from slackwater.control.lending import commands

ServingCommand: TypeAlias = commands.LendNode | commands.TakeBack | commands.BeginStep


class ServingNodes(Protocol):
    """Nodes of services, which tell the fleet's lender what they use and do what it decides."""

    def start(self) -> None: ...

    def execute(self, command: ServingCommand) -> None: ...

    def check_integrity(self) -> None: ...
