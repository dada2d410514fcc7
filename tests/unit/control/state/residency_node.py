"""A node whose states a controller holds, without I/O: tests end its moves."""

from collections.abc import Callable

from harness.residency_checks import check_residency
from slackwater.control.state import commands as do
from slackwater.control.state import events as on
from slackwater.control.state.residency_controller import ResidencyController
from slackwater.model.residency import StateBudgets, Tier


class Node:
    """A body whose moves end when the test says so."""

    def __init__(self, device: int = 10, host: int = 30, disk: int = 100) -> None:
        self.controller = ResidencyController(StateBudgets(device, host, disk))
        self.now_s = 0.0
        self.moves: list[do.MoveTier] = []
        self.answers: dict[int, str | None] = {}
        self.said: list[do.StateCommand] = []
        self.tickets = 0

    def tell(self, make: Callable[[float], on.StateEvent]) -> list[do.StateCommand]:
        self.now_s += 1.0
        out = list(self.controller.handle(make(self.now_s)))
        check_residency(self.controller)
        for command in out:
            if isinstance(command, do.MoveTier):
                self.moves.append(command)
            elif isinstance(command, do.AnswerTicket):
                self.answers[command.ticket] = command.refused
        self.said += out
        return out

    def register(
        self,
        name: str,
        size: int = 10,
        *,
        warm: bool = True,
        holder: str = "w",
        borrows: tuple[tuple[str, int], ...] = (),
        device: str = "",
    ) -> do.StateCommand:
        whole = size + sum(each for _, each in borrows)
        said = self.tell(
            lambda t: on.DeploymentRegistered(t, name, holder, whole, size, warm, borrows, device)
        )
        return said[0]

    def ask(self, name: str, tier: Tier = Tier.DEVICE, *, lease: bool = True) -> int:
        self.tickets += 1
        ticket = self.tickets
        self.tell(lambda t: on.ResidencyAsked(t, ticket, name, tier, lease))
        return ticket

    def evict(self, name: str, tier: Tier = Tier.HOST) -> int:
        self.tickets += 1
        ticket = self.tickets
        self.tell(lambda t: on.EvictionAsked(t, ticket, name, tier))
        return ticket

    def finish(self) -> None:
        """End every move, and what it leads to."""
        while self.moves:
            move = self.moves.pop(0)
            self.tell(lambda t, move=move: on.MoveDone(t, move.deployment, move.to))  # type: ignore[misc]

    def run(self, name: str) -> None:
        ticket = self.ask(name)
        self.finish()
        assert self.answers[ticket] is None

    def release(self, name: str) -> None:
        self.tell(lambda t: on.LeaseReleased(t, name))
