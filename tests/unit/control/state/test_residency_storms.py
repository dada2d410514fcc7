"""Storms of deaths, full disks and hints: budgets hold, and every wait ends."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from residency_node import Node

from slackwater.control.state import events as on
from slackwater.model.residency import Tier


@given(st.integers(0, 2**32))
def test_whatever_happens_budgets_hold_and_nobody_waits_for_ever(seed: int) -> None:
    storm(random.Random(seed), 120)


@pytest.mark.parametrize("seed", range(20))
def test_long_storms_of_deaths_full_disks_and_hints(seed: int) -> None:
    storm(random.Random(seed), 1500)


class Storm:
    """Random events; moves that end, fail or are cut by a death; then calm, in which every wait
    must end.
    """

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.node = Node(draw.choice([10, 20, 35]), draw.choice([20, 40]), draw.choice([0, 20, 60]))
        self.names = "abcdef"
        self.warm = draw.choice([0.0, 0.3, 1.0])
        self.leased: list[str] = []
        self.waiting: dict[int, str] = {}
        self.reading: list[str] = []

    def step(self) -> None:
        acts = [self.register, self.ask, self.ask, self.ask, self.evict, self.release]
        acts += [self.end_move, self.end_move, self.kill, self.hint, self.read, self.forget]
        self.draw.choice(acts)(self.draw.choice(self.names))
        for ticket in [t for t in self.waiting if t in self.node.answers]:
            granted = self.waiting.pop(ticket)
            if self.node.answers[ticket] is None:
                self.leased.append(granted)

    def register(self, name: str) -> None:
        size, warm = self.draw.choice([3, 7, 10]), self.draw.random() < self.warm
        self.node.register(
            name, size, warm=warm, holder=self.draw.choice("uvw"), borrows=self.borrowed(name)
        )

    def borrowed(self, name: str) -> tuple[tuple[str, int], ...]:
        """One of two bases, both, or (a replica) what another deployment has."""
        bases, others = (("frozen-1", 4), ("frozen-2", 9)), [n for n in self.names if n != name]
        known = [n for n in others if self.node.controller.tier(n) is not None]
        match self.draw.randrange(6):
            case 0:
                return ()
            case 1 if known:
                return ((self.draw.choice(known), 0),)
            case 2:
                return bases
            case kind:
                return (bases[kind % 2],)

    def ask(self, name: str) -> None:
        tier = self.draw.choice([Tier.DEVICE, Tier.HOST])
        ticket = self.node.ask(name, tier, lease=tier is Tier.DEVICE)
        if tier is Tier.DEVICE:
            self.waiting[ticket] = name

    def evict(self, name: str) -> None:
        self.node.evict(name, self.draw.choice([Tier.HOST, Tier.DISK]))

    def release(self, name: str) -> None:
        if self.leased:
            held = self.leased.pop(self.draw.randrange(len(self.leased)))
            self.node.release(held)

    def end_move(self, name: str) -> None:
        if not self.node.moves:
            return
        move = self.draw.choice(self.node.moves)
        if move.to is Tier.DEVICE and any(
            other.to is Tier.HOST and other.deployment == move.deployment
            for other in self.node.moves
        ):
            return  # what follows ends later than what it follows
        self.node.moves.remove(move)
        if self.draw.random() < 0.15:
            self.node.tell(lambda t: on.MoveFailed(t, move.deployment, move.to, "broken"))
        else:
            self.node.tell(lambda t: on.MoveDone(t, move.deployment, move.to))

    def kill(self, name: str) -> None:
        holder = self.draw.choice("uvwxyz")
        self.node.tell(lambda t: on.HolderGone(t, holder))

    def hint(self, name: str) -> None:
        names = tuple(self.draw.sample(self.names, 3))
        self.node.tell(lambda t: on.NextHinted(t, names))

    def read(self, name: str) -> None:
        if self.draw.random() < 0.5 or not self.reading:
            self.node.tell(lambda t: on.ReadingBegan(t, name))
            self.reading.append(name)
        else:
            done = self.reading.pop()
            self.node.tell(lambda t: on.ReadingEnded(t, done))

    def forget(self, name: str) -> None:
        if self.draw.random() < 0.2:
            self.node.tell(lambda t: on.DeploymentForgotten(t, name))

    def calm(self) -> None:
        """Nothing fails any more, operations end, readers leave: then every wait is answered."""
        for name in self.reading:
            self.node.tell(lambda t, n=name: on.ReadingEnded(t, n))  # type: ignore[misc]
        for _ in range(400):
            for name in self.names:
                self.node.release(name)
            if not self.node.moves and len(self.node.answers) == self.node.tickets:
                break
            self.node.finish()
        assert len(self.node.answers) == self.node.tickets


def storm(draw: random.Random, events: int) -> None:
    weather = Storm(draw)
    for _ in range(events):
        weather.step()
    weather.calm()
