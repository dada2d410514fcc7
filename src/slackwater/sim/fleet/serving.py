"""The interface of a simulated fleet's serving nodes."""

from typing import Protocol, TypeAlias

from slackwater.control.lending import commands

ServingCommand: TypeAlias = commands.LendNode | commands.ReclaimNode | commands.BeginStep


class ServingNodes(Protocol):
    """Nodes of services, which report their use to the fleet's lender and execute its commands."""

    def start(self) -> None: ...

    def execute(self, command: ServingCommand) -> None: ...
