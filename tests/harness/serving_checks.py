"""The invariants of a simulated serving cluster, for storms and tests."""

from slackwater.sim.serving.cluster import ServingCluster
from slackwater.sim.serving.node import ServingNode
from slackwater.sim.serving.rollout_share import RolloutShare
from slackwater.sim.serving.service_share import ServiceShare


def check_serving(cluster: ServingCluster) -> None:
    """Raise AssertionError if a node is inconsistent, or lender and nodes disagree."""
    cluster.lender.check_integrity()
    for node in cluster.nodes.values():
        _check_node(node)
    lent = cluster.lender.loans()
    assert set(cluster._borrowed) <= set(lent), "a node runs rollouts that it was not lent for"


def _check_node(node: ServingNode) -> None:
    """Memory is not used twice."""
    check_service(node.service)
    rollout = node.rollout
    if rollout is not None:
        _check_rollout(rollout)
        used = rollout.kv_used_tokens + rollout.prefix_tokens
        both = used * node._rollout_bytes + node._serving_bytes()
        slack = (rollout.running + len(node.service.decoding) + 1) * node._bytes
        assert both <= node.arbiter.budget.capacity + slack, "memory is used twice"


def _check_rollout(share: RolloutShare) -> None:
    """Every request is in one place; memory is that of the requests and prefixes."""
    share.settle()
    chunked, decodes = share._chunked, share._decodes
    places = [*chunked, *decodes, *(request.attempt for request in share._queue)]
    assert sorted(places) == sorted(share.requests)
    running = [*decodes.values(), *(request for request, _ in chunked.values())]
    assert sum(request.context_tokens for request in running) == share._held_context
    assert sum(tokens for tokens, _ in share._prefixes.values()) == share._prefix_tokens


def check_service(share: ServiceShare) -> None:
    """Memory is exactly that of the requests that hold some."""
    held = sum(request.prompt_tokens for request in share.queue if request.admitted)
    made = {n: share._steps - request.began_step for n, request in share.decoding.items()}
    held += sum(r.prompt_tokens + 1 + made[n] for n, r in share.decoding.items())
    assert held == share.kv_tokens, f"{share.kv_tokens} tokens held, {held} accounted for"
    for request in share.queue:
        kept = request.queued
        request.describe_prompt()
        assert kept == request.queued, f"{kept} kept of {request}"
