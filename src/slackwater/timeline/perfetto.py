"""A run as Chrome trace events for Perfetto (ui.perfetto.dev) or chrome://tracing.

One process per pool, one thread per node; phases and switches are slices, cost per hour a counter.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from slackwater.model.ids import NodeId
from slackwater.timeline.spans import Span, Timeline

_POOLS = ("rollout", "train")
_FLEET_PID = len(_POOLS) + 1


def trace_json(timeline: Timeline) -> Iterator[bytes]:
    """The trace in pieces, so that a long run need not be held twice."""
    yield b'{"displayTimeUnit":"ms","traceEvents":[\n'
    separator = b""
    for event in _events(timeline):
        yield separator + json.dumps(event, separators=(",", ":")).encode()
        separator = b",\n"
    yield b'\n],"otherData":' + json.dumps(dict(timeline.about)).encode() + b"}\n"


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    threads = _threads([rental.node for rental in timeline.rentals])
    yield from _names(threads)
    for rental in timeline.rentals:
        pid, tid = threads[rental.node]
        yield {
            "ph": "X",
            "name": "rented",
            "cat": "rental",
            "pid": pid,
            "tid": tid,
            "ts": rental.start_s * 1e6,
            "dur": (rental.end_s - rental.start_s) * 1e6,
        }
    for span in timeline.spans:
        yield _slice(span, *threads[span.node])
    for step in timeline.cost_steps:
        price = {"dollars": round(step.price_per_h, 4)}
        at = {"ph": "C", "name": "cost per hour", "pid": _FLEET_PID, "ts": step.at_s * 1e6}
        yield {**at, "args": price}


def _slice(span: Span, pid: int, tid: int) -> dict[str, Any]:
    what = span.phase.value if span.kind == "run" else f"{span.phase.value} ({span.kind})"
    return {
        "ph": "X",
        "name": f"{span.job} {what}",
        "cat": f"{span.phase.value},{span.kind}",
        "pid": pid,
        "tid": tid,
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {"job": span.job, **span.about},
    }


def node_order(node: NodeId) -> tuple[int, int, str]:
    """Rollout nodes before train nodes, each by number."""
    pool, _, number = node.rpartition("-")
    rank = _POOLS.index(pool) if pool in _POOLS else len(_POOLS)
    return rank, int(number) if number.isdigit() else 0, node


def _threads(nodes: Iterable[NodeId]) -> dict[NodeId, tuple[int, int]]:
    ordered = sorted(set(nodes), key=node_order)
    return {node: (node_order(node)[0] + 1, tid) for tid, node in enumerate(ordered, start=1)}


def _names(threads: dict[NodeId, tuple[int, int]]) -> Iterator[dict[str, Any]]:
    def named(pid: int, tid: int, what: str, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}

    for rank, pool in enumerate(_POOLS, start=1):
        yield named(rank, 0, "process_name", f"{pool} nodes")
    yield named(_FLEET_PID, 0, "process_name", "fleet")
    for node, (pid, tid) in threads.items():
        yield named(pid, tid, "thread_name", node)
