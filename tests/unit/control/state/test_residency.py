"""The book of a node's states: budgets, order, prefetch, deaths."""

from residency_node import Node

from slackwater.control.state import commands as do
from slackwater.control.state import events as on
from slackwater.model.residency import Tier


def test_a_device_switches_its_state_and_the_others_keep_theirs() -> None:
    node = Node(device=10, host=40)
    for name, device in (("a", "GPU-0"), ("b", "GPU-0"), ("c", "GPU-1")):
        node.register(name, holder=f"w{device}", device=device)
    for name in ("a", "c"):
        node.run(name)
        node.release(name)
    node.run("b")
    tiers = {name: node.controller.tier(name) for name in "abc"}
    assert tiers == {"a": Tier.HOST, "b": Tier.DEVICE, "c": Tier.DEVICE}
    assert (
        node.controller.bytes_in_use(Tier.DEVICE, "GPU-0")
        == node.controller.bytes_in_use(Tier.DEVICE, "GPU-1")
        == 10
    )
    waits = node.ask("a")  # b runs on its device, whatever is free on the other
    node.finish()
    assert waits not in node.answers and node.controller.tier("c") is Tier.DEVICE


def test_a_state_that_fits_no_tier_is_refused_at_admission_with_the_numbers() -> None:
    node = Node(device=10, host=15)
    assert isinstance(node.register("a", 10), do.Admit)
    refused = node.register("b", 10)
    assert isinstance(refused, do.Refuse)
    assert "10 bytes of host memory" in refused.reason and "5 of 15" in refused.reason
    too_large = node.register("c", 11)
    assert isinstance(too_large, do.Refuse) and "on the device" in too_large.reason


def test_the_next_job_evicts_the_idle_one_and_waits_for_the_running_one() -> None:
    node = Node()
    node.register("a"), node.register("b")
    node.run("a")
    ticket = node.ask("b")
    node.finish()
    assert ticket not in node.answers  # a runs
    node.release("a")
    node.finish()
    assert node.answers[ticket] is None
    assert node.controller.tier("a") is Tier.HOST and node.controller.tier("b") is Tier.DEVICE


def test_a_hint_brings_the_next_state_up_beside_the_running_one_where_it_fits() -> None:
    node = Node(device=20)
    for name in "abc":
        node.register(name)
    node.run("a")
    node.tell(lambda t: on.NextHinted(t, ("b", "c")))
    node.finish()
    assert node.controller.tier("b") is Tier.DEVICE
    assert node.controller.tier("c") is Tier.HOST  # no room, and a runs


def test_a_hint_never_pushes_out_what_is_needed_sooner() -> None:
    node = Node(device=10)
    node.register("a"), node.register("b")
    node.run("a")
    node.release("a")
    node.tell(lambda t: on.NextHinted(t, ("a", "b")))
    node.finish()
    assert node.controller.tier("a") is Tier.DEVICE


def test_a_hint_never_pushes_out_a_state_between_two_operations_of_its_phase() -> None:
    node = Node(device=20)
    for name in "abc":
        node.register(name)
        node.run(name)
        node.release(name)
    node.finish()  # b and c are there
    for _ in range(2):
        node.tell(lambda t: on.NextHinted(t, ("b", "a"), ("b",)))
        node.run("b")
        node.release("b")
        node.finish()
        assert node.controller.tier("a") is Tier.DEVICE and node.controller.tier("b") is Tier.DEVICE
    node.tell(lambda t: on.NextHinted(t, ("c", "b", "a"), ("b", "a")))
    node.finish()
    assert node.controller.tier("c") is Tier.HOST
    node.tell(lambda t: on.NextHinted(t, ("c",)))  # the phases are over
    node.finish()
    assert node.controller.tier("c") is Tier.DEVICE


def test_operations_that_find_their_state_are_counted_apart_from_those_that_wait() -> None:
    node = Node(device=10)
    node.register("a"), node.register("b")
    node.run("a")
    node.release("a")
    node.tell(lambda t: on.NextHinted(t, ("b",)))
    node.finish()
    node.run("b")
    assert (node.controller.found, node.controller.waited, node.controller.early) == (1, 1, 1)


def test_an_early_load_counts_once_it_is_done_and_nobody_waits_for_it() -> None:
    node = Node(device=10)
    node.register("a")
    node.tell(lambda t: on.NextHinted(t, ("a",)))
    assert node.controller.early == 0  # it has only begun
    node.run("a")
    assert (node.controller.found, node.controller.waited, node.controller.early) == (0, 1, 0)


def test_what_was_offloaded_survives_its_worker_and_is_taken_over_by_another() -> None:
    node = Node()
    node.register("a")
    node.run("a")
    node.release("a")
    node.evict("a")
    node.finish()
    assert node.tell(lambda t: on.HolderGone(t, "w")) == []
    assert node.register("a", holder="w2") == do.Admit("a", blank=False)
    node.run("a")


def test_a_death_on_the_device_falls_back_to_the_last_image_and_without_one_is_a_loss() -> None:
    node = Node(device=20)
    node.register("a"), node.register("b")
    node.run("a")
    node.release("a")
    node.evict("a")
    node.finish()
    node.run("a")
    node.run("b")
    said = node.tell(lambda t: on.HolderGone(t, "w"))
    assert do.ReportFallback("a") in said and do.ReportStateLost("b") in said
    assert node.controller.tier("a") is Tier.HOST and node.controller.tier("b") is None


def test_a_death_in_the_middle_of_an_offload_does_not_pass_a_torn_image_for_a_state() -> None:
    node = Node()
    node.register("a")
    node.run("a")
    node.release("a")
    node.evict("a")
    assert do.ReportStateLost("a") in node.tell(lambda t: on.HolderGone(t, "w"))


def test_a_full_disk_is_said_to_whoever_waits_and_nothing_is_lost() -> None:
    node = Node(host=10)
    node.register("a", warm=False), node.register("b", warm=False)
    node.run("a")
    node.release("a")
    ticket = node.ask("b")
    while node.moves:
        move = node.moves.pop(0)
        if move.to is Tier.DISK:
            node.tell(lambda t: on.MoveFailed(t, "a", Tier.DISK, "no space left on disk"))
        else:
            node.tell(lambda t, move=move: on.MoveDone(t, move.deployment, move.to))  # type: ignore[misc]
    assert "no space left" in str(node.answers[ticket])
    assert node.controller.tier("a") is Tier.HOST


def test_a_state_is_not_overwritten_while_a_checkpoint_is_made_of_it() -> None:
    node = Node()
    node.register("a")
    node.run("a")
    node.tell(lambda t: on.ReadingBegan(t, "a"))
    node.release("a")
    ticket = node.evict("a")
    assert node.moves == [] and ticket not in node.answers
    node.tell(lambda t: on.ReadingEnded(t, "a"))
    node.finish()
    assert node.answers[ticket] is None


def test_an_image_that_the_disk_still_has_is_not_written_again() -> None:
    node = Node(host=20)
    for name in "ab":
        node.register(name, warm=False)
    node.run("a")
    node.release("a")
    node.evict("a", Tier.DISK)
    node.finish()
    node.ask("a", Tier.HOST, lease=False)
    node.finish()
    node.evict("a", Tier.DISK)
    assert node.moves == [] and node.controller.tier("a") is Tier.DISK


def a_state_on_disk(node: Node) -> None:
    node.register("a", warm=False)
    node.run("a")
    node.release("a")
    node.evict("a", Tier.DISK)
    node.finish()
    assert node.controller.tier("a") is Tier.DISK


def test_from_disk_the_bytes_go_on_to_the_device_as_they_arrive() -> None:
    node = Node()
    a_state_on_disk(node)
    ticket = node.ask("a")
    assert node.moves == [do.MoveTier("a", Tier.HOST), do.MoveTier("a", Tier.DEVICE, follows=True)]
    assert node.controller.bytes_in_use(Tier.DEVICE) == 10
    node.finish()
    assert node.answers[ticket] is None and node.controller.tier("a") is Tier.DEVICE


def test_from_disk_the_device_is_cleared_while_the_disk_is_read() -> None:
    node = Node(host=30)
    a_state_on_disk(node)
    node.register("b")
    node.run("b")
    node.release("b")
    ticket = node.ask("a")
    assert node.moves == [do.MoveTier("a", Tier.HOST), do.MoveTier("b", Tier.HOST)]
    node.tell(lambda t: on.MoveDone(t, node.moves.pop().deployment, Tier.HOST))
    assert node.moves == [do.MoveTier("a", Tier.HOST), do.MoveTier("a", Tier.DEVICE, follows=True)]
    node.finish()
    assert node.answers[ticket] is None


def test_a_worker_that_dies_while_its_state_comes_from_disk_finds_it_on_the_host() -> None:
    node = Node()
    a_state_on_disk(node)
    ticket = node.ask("a")
    node.tell(lambda t: on.HolderGone(t, "w"))
    assert (
        "worker has gone" in str(node.answers[ticket])
        and node.controller.bytes_in_use(Tier.DEVICE) == 0
    )
    node.finish()
    assert node.controller.tier("a") is Tier.HOST


def test_a_disk_that_fails_leaves_the_state_there_and_the_device_free() -> None:
    node = Node()
    a_state_on_disk(node)
    ticket = node.ask("a")
    node.moves.clear()
    node.tell(lambda t: on.MoveFailed(t, "a", Tier.DEVICE, "unreadable"))
    node.tell(lambda t: on.MoveFailed(t, "a", Tier.HOST, "unreadable"))
    assert node.answers[ticket] == "unreadable" and node.controller.tier("a") is Tier.DISK
    assert node.controller.bytes_in_use(Tier.DEVICE) == node.controller.bytes_in_use(Tier.HOST) == 0


def adapters(node: Node, own: int, base: int, names: str = "ab") -> None:
    """Deployments over one frozen base."""
    for name in names:
        said = node.register(name, own, warm=False, borrows=(("frozen-1", base),))
        assert isinstance(said, do.Admit), said
        node.run(name)
        node.release(name)


def test_a_base_is_counted_once_and_outlives_whoever_brought_it() -> None:
    node = Node(device=10, host=20)
    adapters(node, 3, 7)
    assert node.controller.bytes_in_use(Tier.HOST) == 3 + 3 + 7
    node.tell(lambda t: on.DeploymentForgotten(t, "a"))
    assert node.controller.bytes_in_use(Tier.HOST) == 3 + 7
    node.run("b")
    node.release("b")
    said = node.tell(lambda t: on.DeploymentForgotten(t, "b"))
    assert do.Drop("frozen-1") in said and node.controller.bytes_in_use(Tier.HOST) == 0


def test_adapters_take_turns_where_the_host_holds_the_base_and_one_of_them() -> None:
    node = Node(device=10, host=10)
    adapters(node, 3, 7)
    for name in "abab":
        node.run(name)
        node.release(name)
    assert node.controller.tier("frozen-1") is Tier.HOST, "used by both, so it is the last to leave"


def test_a_base_comes_back_from_disk_before_what_borrows_it_goes_on() -> None:
    node = Node(device=10, host=10)
    adapters(node, 3, 7, "a")
    node.register("c", 10, warm=False)
    node.run("c")
    node.release("c")
    assert node.controller.tier("a") is node.controller.tier("frozen-1") is Tier.DISK
    ticket = node.ask("a")
    node.finish()
    assert node.answers[ticket] is None and node.controller.tier("a") is Tier.DEVICE
    assert node.controller.tier("frozen-1") is Tier.HOST


def test_a_base_stays_on_the_host_while_one_is_loaded_from_it() -> None:
    node = Node(device=20, host=20)
    adapters(node, 3, 7, "a")
    node.register("b", 3, warm=False, borrows=(("frozen-1", 7),))
    node.ask("b", Tier.HOST, lease=False)
    node.finish()
    node.ask("b")
    assert do.MoveTier("b", Tier.DEVICE, blank=True) in node.moves
    node.register("c", 10, warm=False)
    node.ask("c")
    assert not [move for move in node.moves if move.deployment == "frozen-1"]
    node.finish()


def test_an_adapter_that_never_fits_beside_its_base_is_refused_with_the_numbers() -> None:
    node = Node(device=10, host=9)
    refused = node.register("a", 3, warm=False, borrows=(("frozen-1", 7),))
    assert isinstance(refused, do.Refuse)
    assert "10 bytes of host memory" in refused.reason and "9 of 9" in refused.reason
    assert node.controller.tier("frozen-1") is None
    node = Node(device=10, host=15, disk=0)
    assert isinstance(node.register("a", 3, borrows=(("frozen-1", 7),)), do.Admit)
    assert isinstance(node.register("b", 3, borrows=(("frozen-1", 7),)), do.Admit)
    refused = node.register("c", 3, borrows=(("frozen-1", 7),))
    assert isinstance(refused, do.Refuse)
    assert "3 bytes of host memory" in refused.reason and "2 of 15" in refused.reason


def test_a_base_that_cannot_be_read_is_said_to_whoever_waits_for_what_borrows_it() -> None:
    node = Node(device=10, host=10)
    adapters(node, 3, 7, "a")
    node.evict("a", Tier.DISK)
    node.finish()
    node.register("c", 10, warm=False)
    node.run("c")
    node.release("c")
    ticket = node.ask("a")
    while ticket not in node.answers:
        move = node.moves.pop(0)
        if move == do.MoveTier("frozen-1", Tier.HOST):
            node.tell(lambda t: on.MoveFailed(t, "frozen-1", Tier.HOST, "unreadable"))
        else:
            node.tell(lambda t, move=move: on.MoveDone(t, move.deployment, move.to))  # type: ignore[misc]
    assert node.answers[ticket] == "unreadable"
