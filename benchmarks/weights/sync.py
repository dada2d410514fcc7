"""`slackwater bench sync`: a model to four receivers over a slow link, four ways; and at full speed
against plain sockets.

The link: 200 Mb/s (a 20 Gb/s link scaled down a hundredfold) in front of the sender, shaped by `tc`
between network namespaces. Flat: every receiver takes the whole over the link. One copy: the whole
crosses once, neighbours pass it on. Delta: the next version, 1 % changed.
"""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Any

from benchmarks.options import BenchOptions
from benchmarks.weights.pulling import decode_while_pulling
from harness.namespaces import Host, can_make_hosts, hosts
from harness.weight_sequences import Outcome, run_sequence
from slackwater.model.errors import UnavailableError

PARTS = ("loopback", "sequences", "link", "decode")
_RATE_MBIT = 200
_RECEIVERS = 4
_SHARE = 0.01


class _Actor:
    """A process of the measurement; every request is one line, every answer too."""

    def __init__(self, stack: ExitStack, role: str, inside: Host | None, **settings: Any) -> None:
        module = "benchmarks.weights.sync_process"
        command = [sys.executable, "-m", module, role]
        self._process = stack.enter_context(
            subprocess.Popen(
                command if inside is None else inside.command(*command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(self._process.kill)
        self.ready = self._asked(settings)  # with a secret, which is no argument

    def ask(self, *what: object) -> dict[str, Any]:
        return self._asked(what)

    def _asked(self, what: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UnavailableError("a process of the measurement ended early; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def run(options: BenchOptions) -> dict[str, object]:
    """Loopback first, then the slow link, which leaves the processors to the random sequences of
    faults, then decoding.
    """
    size = (64 << 20) if options.quick else (1 << 30)
    figures: dict[str, object] = {"model_bytes": size, "receivers": _RECEIVERS}
    if options.wants("loopback"):
        options.progress("loopback", 0.02)
        figures |= _loopback(size, options.seed, 3)
    with ProcessPoolExecutor(1, get_context("spawn"), _nicely) as beside:
        sequences: Future[dict[str, object]] | None = None
        if options.wants("sequences"):
            sequences = beside.submit(_sequences, options.seed, 20 if options.quick else 500)
        if options.wants("link"):
            figures |= _slow_link(size, options, sequences)
        if sequences is not None:
            options.progress("sequences", 0.8)
            figures |= sequences.result()
    if options.wants("decode"):
        options.progress("decoding beside pulls", 0.95)
        figures |= decode_while_pulling(4 if options.quick else 60, options.seed)
    return figures


def _nicely() -> None:
    os.nice(10)


def _loopback(size: int, seed: int, rounds: int) -> dict[str, object]:
    """One receiver on the same machine, the whole over TCP, beside one plain socket; best of a few,
    in turns.
    """
    secret = secrets.token_hex(16)
    ours, plain = float("inf"), float("inf")
    ours_cpu, plain_cpu = float("inf"), float("inf")
    with ExitStack() as stack:
        sender = _Actor(
            stack, "sender", None, host="127.0.0.1", secret=secret, size=size, seed=seed, flat=False
        )
        bare = _Actor(stack, "plain_sender", None, host="127.0.0.1", size=size)
        exact = True
        for number in range(rounds):
            # Both receivers are new processes: neither has pages from the round before, and both
            # find memory that the machine has.
            with ExitStack() as one, ThreadPoolExecutor(1) as beside:
                taker = _Actor(one, "plain_receiver", None, relay=bare.ready["address"], size=size)
                taker.ask("touch")
                sending = beside.submit(bare.ask, "send")
                taken = taker.ask("take")
                plain = min(plain, taken["took_s"])
                plain_cpu = min(plain_cpu, taken["cpu_s"] + sending.result()["cpu_s"])
            with ExitStack() as one:
                receiver = _Actor(
                    one, "receiver", None, host="127.0.0.1", secret=secret, size=size,
                    relay=sender.ready["relay"], name=f"r{number}", site=f"s{number}",
                )  # fmt: skip
                receiver.ask("touch")
                before = sender.ask("cpu")["cpu_s"]
                pulled = receiver.ask("pull", "v0")
                sent = sender.ask("cpu")["cpu_s"] - before
                ours = min(ours, pulled["took_s"])
                ours_cpu = min(ours_cpu, pulled["cpu_s"] + sent)
                exact = exact and pulled["digest"] == sender.ready["digest"]
    return {
        "loopback_gb_s": size / ours / 1e9,
        "plain_sockets_gb_s": size / plain / 1e9,
        "loopback_over_plain": plain / ours,
        "loopback_cpu_over_plain": plain_cpu / ours_cpu,
        "loopback_exact": exact,
    }


def _slow_link(
    size: int, options: BenchOptions, sequences: "Future[dict[str, object]] | None"
) -> dict[str, object]:
    """Flat takes minutes and hardly a processor: the sequences run beside it, and are over before
    what is timed closely.
    """
    if not can_make_hosts():
        return {"slow_link": "not measured: this user may make no network namespaces"}
    with hosts(1 + _RECEIVERS) as site:
        site.hosts[0].shape(_RATE_MBIT)
        options.progress("flat", 0.1)
        flat = pulled(site.hosts, size, options.seed, flat=True)
        if sequences is not None:
            sequences.exception()  # until they are over
        options.progress("one copy", 0.6)
        tree = pulled(site.hosts, size, options.seed, flat=False)
    one_copy_s, delta_s = tree["whole_s"], tree["delta_s"]
    return {
        "flat_s": flat["whole_s"],
        "one_copy_s": one_copy_s,
        "delta_s": delta_s,
        "delta_publish_s": tree["publish_s"],
        "delta_bytes": tree["delta_bytes"],
        "one_copy_over_flat": flat["whole_s"] / one_copy_s,
        "delta_over_flat": flat["whole_s"] / delta_s,
        "line_rate_used": size * 8 / one_copy_s / (_RATE_MBIT * 1e6),
        "crossed_over_one_copy": tree["crossed"] / size,
        "slow_link_exact": flat["exact"] and tree["exact"],
    }


def pulled(site: Sequence[Host], size: int, seed: int, *, flat: bool) -> dict[str, Any]:
    """The first host sends; all others pull the whole at once, and then, unless flat, the next
    version.
    """
    secret = secrets.token_hex(16)
    source = site[0]
    with ExitStack() as stack:
        sender = _Actor(
            stack, "sender", source, host=source.address, secret=secret, size=size,
            seed=seed, flat=flat,
        )  # fmt: skip
        receivers = [
            _Actor(
                stack, "receiver", host, host=host.address, secret=secret, size=size,
                relay=sender.ready["relay"], name=host.name, site="rollout",
            )
            for host in site[1:]
        ]  # fmt: skip
        found: dict[str, Any] = {}
        found["whole_s"], answers = _together(receivers, "v0")
        found["exact"] = all(a["digest"] == sender.ready["digest"] for a in answers)
        found["crossed"] = sum(answer["received"].get("", 0) for answer in answers)
        if not flat:
            for receiver in receivers:
                receiver.ask("forget_payload", "v0")
            published = sender.ask("next", _SHARE)
            found["delta_s"], answers = _together(receivers, "v1")
            found["exact"] &= all(a["digest"] == published["digest"] for a in answers)
            found |= {key: published[key] for key in ("publish_s", "delta_bytes")}
    return found


def _together(receivers: list[_Actor], version: str) -> tuple[float, list[dict[str, Any]]]:
    """The longest of pulls that begin together."""
    with ThreadPoolExecutor(len(receivers)) as beside:
        answers = list(beside.map(lambda receiver: receiver.ask("pull", version), receivers))
    return max(answer["took_s"] for answer in answers), answers


def _sequences(seed: int, count: int) -> dict[str, object]:
    outcome = Outcome()
    began_s = time.perf_counter()
    for number in range(count):
        run_sequence(seed * 1000 + number, outcome)
    return {
        "sequences": count,
        "sequence_pulls": outcome.pulls,
        "sequence_errors_told": outcome.errors,
        "sequence_torn": outcome.torn,
        "sequence_behind": outcome.behind,
        "sequence_above_memory_bound": outcome.above_bound,
        "sequences_s": time.perf_counter() - began_s,
    }
