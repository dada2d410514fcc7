"""A run as Chrome trace events for Perfetto: a process per pool, a thread per node."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from slackwater.model.ids import NodeId
from slackwater.timeline.lanes import KINDS, LaneTimeline
from slackwater.timeline.spans import Span, Timeline

_POOLS = ("rollout", "train")
_FLEET_PID = len(_POOLS) + 1
_MAX_WRITTEN = 200_000  # spans of lanes


def trace_json(timeline: Timeline) -> Iterator[bytes]:
    """The trace in pieces, so that a long run need not be held twice."""
    yield from _write_trace(_events(timeline), timeline.about)


def lanes_json(timeline: LaneTimeline, now_s: float) -> Iterator[bytes]:
    """A service's lanes as a trace, newest spans: a process per pool, a thread per device."""
    yield from _write_trace(_lane_events(timeline, now_s), {})


def _write_trace(events: Iterable[dict[str, Any]], about: Mapping[str, Any]) -> Iterator[bytes]:
    yield b'{"displayTimeUnit":"ms","traceEvents":[\n'
    separator = b""
    for event in events:
        yield separator + json.dumps(event, separators=(",", ":")).encode()
        separator = b",\n"
    yield b'\n],"otherData":' + json.dumps(dict(about)).encode() + b"}\n"


def _lane_events(timeline: LaneTimeline, now_s: float) -> Iterator[dict[str, Any]]:
    lanes = timeline.lanes()
    pids = {pool: pid for pid, pool in enumerate(dict.fromkeys(lane.pool for lane in lanes), 1)}
    for pool, pid in pids.items():
        yield _metadata_event(pid, 0, "process_name", pool)
    most = max(_MAX_WRITTEN // max(len(lanes), 1), 100)
    for tid, lane in enumerate(lanes, start=1):
        thread = (pids[lane.pool], tid)
        yield _metadata_event(*thread, "thread_name", lane.name)
        for since_s, until_s in lane.rented_s:
            yield _rental_event(thread, since_s, now_s if until_s is None else until_s)
        for start_s, end_s, number, kind in timeline.spans(lane, now_s)[-most:]:
            job, what = timeline.jobs[number], KINDS[kind]
            phase = {"switch": "rollout,switch", "tail": "rollout,tail"}.get(what, f"{what},run")
            event = _complete_event(f"{job} {what}", phase, thread, start_s, end_s)
            yield event | {"args": {"job": job}}


def _complete_event(
    name: str, category: str, thread: tuple[int, int], start_s: float, end_s: float
) -> dict[str, Any]:
    """An event with a duration, on the thread (process, thread) of a node or lane."""
    where = {"ph": "X", "name": name, "cat": category, "pid": thread[0], "tid": thread[1]}
    return where | {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}


def _rental_event(thread: tuple[int, int], start_s: float, end_s: float) -> dict[str, Any]:
    return _complete_event("rented", "rental", thread, start_s, end_s)


def _metadata_event(pid: int, tid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    threads = _threads([rental.node for rental in timeline.rentals])
    yield from _names(threads)
    for rental in timeline.rentals:
        yield _rental_event(threads[rental.node], rental.start_s, rental.end_s)
    for span in timeline.spans:
        yield _span_event(span, threads[span.node])
    for step in timeline.cost_steps:
        price = {"dollars": round(step.price_per_h, 4)}
        at = {"ph": "C", "name": "cost per hour", "pid": _FLEET_PID, "ts": step.at_s * 1e6}
        yield {**at, "args": price}


def _span_event(span: Span, thread: tuple[int, int]) -> dict[str, Any]:
    what = span.phase.value if span.kind == "run" else f"{span.phase.value} ({span.kind})"
    name, category = f"{span.job} {what}", f"{span.phase.value},{span.kind}"
    event = _complete_event(name, category, thread, span.start_s, span.end_s)
    return event | {"args": {"job": span.job, **span.about}}


def node_order(node: NodeId) -> tuple[int, int, str]:
    """Rollout nodes before train nodes, each by number."""
    pool, _, number = node.rpartition("-")
    rank = _POOLS.index(pool) if pool in _POOLS else len(_POOLS)
    return rank, int(number) if number.isdigit() else 0, node


def _threads(nodes: Iterable[NodeId]) -> dict[NodeId, tuple[int, int]]:
    ordered = sorted(set(nodes), key=node_order)
    return {node: (node_order(node)[0] + 1, tid) for tid, node in enumerate(ordered, start=1)}


def _names(threads: dict[NodeId, tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for rank, pool in enumerate(_POOLS, start=1):
        yield _metadata_event(rank, 0, "process_name", f"{pool} nodes")
    yield _metadata_event(_FLEET_PID, 0, "process_name", "fleet")
    for node, (pid, tid) in threads.items():
        yield _metadata_event(pid, tid, "thread_name", node)
