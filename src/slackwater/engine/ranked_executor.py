"""An engine on several ranks: rank 0 schedules and samples, every rank computes its part.

Rank 0 tells the others each call of its executor, in one small broadcast; the calls then meet in
the collectives inside. Of weights only the name travels: each rank fetches its own slices.
"""

import itertools
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slackwater.engine.executor import Executor, RowBatch, SamplingColumns, StepwiseDecode
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.loading import empty_like
from slackwater.nets.lora import LoraAdapter, LoraSpec
from slackwater.nets.ranks import Ranks

Fetch = Callable[[str], Mapping[str, Tensor]]
_BATCH = ("tokens", "positions", "slots", "wanted")


class RankSlices(dict[str, Tensor]):
    """One rank's slices of a version, whose name the other ranks fetch theirs by."""

    def __init__(self, version: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.version = version


class RankedExecutor(StepwiseDecode):
    """Rank 0's executor: `inner` computes its own part.

    Calls may come from two threads, as `Executor.write` says; ranks take them one after the other.
    """

    def __init__(self, inner: Executor, ranks: Ranks) -> None:
        self._inner, self._ranks = inner, ranks
        self.block_tokens, self.block_bytes = inner.block_tokens, inner.block_bytes
        self.arena = inner.arena
        # Nets and adapters with their numbers, by identity; held, so that none is reused.
        self._things: dict[int, tuple[int, object]] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()

    def prepare(self, net: CausalLM) -> None:
        with self._lock:
            self._tell("prepare", {"net": self._number(net)})
            self._inner.prepare(net)

    def write(self, net: CausalLM, tensors: Mapping[str, Tensor]) -> None:
        assert isinstance(tensors, RankSlices), "the other ranks fetch a version by its name"
        with self._lock:
            self._tell("write", {"net": self._number(net), "version": tensors.version})
        self._inner.write(net, tensors)

    def prepare_adapter(self, net: CausalLM, adapter: LoraAdapter) -> None:
        version, lora = adapter.version, asdict(adapter.spec)
        with self._lock:
            numbers = {"net": self._number(net), "adapter": self._number(adapter)}
            self._tell("adapt", {**numbers, "version": version, "lora": lora})
            self._inner.prepare_adapter(net, adapter)

    def drop_adapter(self, adapter: LoraAdapter) -> None:
        with self._lock:
            self._tell("drop", {"adapter": self._number(adapter)})
            del self._things[id(adapter)]
            self._inner.drop_adapter(adapter)

    def logits(self, net: CausalLM, batch: RowBatch, tables: NDArray[np.int32]) -> Tensor:
        spans = [[start, stop, self._number(adapter)] for start, stop, adapter in batch.spans]
        arrays = {name: getattr(batch, name) for name in _BATCH} | {"tables": tables}
        with self._lock:
            facts = {"net": self._number(net), "spans": spans, "decode_only": batch.decode_only}
            self._tell("logits", facts, arrays)
            return self._inner.logits(net, batch, tables)

    def sample(
        self, logits: Tensor, columns: SamplingColumns
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return self._inner.sample(logits, columns)

    def beat(self) -> None:
        """Now and then while nothing runs: ranks that wait for a call do so with a deadline."""
        with self._lock:
            self._tell("beat", {})
            self._ranks.wait_for_all()

    def close(self) -> None:
        with self._lock:
            self._tell("close", {})
            self._inner.close()

    def _number(self, thing: object) -> int:
        if id(thing) not in self._things:
            self._things[id(thing)] = (next(self._numbers), thing)
        return self._things[id(thing)][0]

    def _tell(
        self,
        call: str,
        facts: Mapping[str, object],
        arrays: Mapping[str, NDArray[Any]] = MappingProxyType({}),
    ) -> None:
        shapes = {name: [str(array.dtype), list(array.shape)] for name, array in arrays.items()}
        head = json.dumps({"call": call, "arrays": shapes, **facts}).encode()
        body = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
        self._ranks.broadcast(len(head).to_bytes(4, "little") + head + body)


class RankFollower:
    """Any other rank: does what rank 0's executor does, on its own part of the model."""

    def __init__(self, base: CausalLM, inner: Executor, ranks: Ranks, fetch: Fetch) -> None:
        self._base, self._inner, self._ranks, self._fetch = base, inner, ranks, fetch
        self._things: dict[int, Any] = {}
        # Rank 0's block pool decides which blocks are used; memory comes when one is touched.
        held = inner.arena.hold(0, inner.arena.size_bytes)
        assert held, "an arena is no larger than its pool"

    def run(self) -> None:
        """Until rank 0 closes its executor."""
        while True:
            call, arrays = _decoded(self._ranks.broadcast(None))
            if call["call"] == "close":
                self._inner.close()
                return
            self._execute(call, arrays)

    def _execute(self, call: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        things = self._things
        match call["call"]:
            case "prepare":
                net = empty_like(self._base) if things else self._base
                things[call["net"]] = net
                self._inner.prepare(net)
            case "write":
                self._inner.write(things[call["net"]], self._fetch(call["version"]))
            case "adapt":
                self._adapt(call)
            case "drop":
                self._inner.drop_adapter(things.pop(call["adapter"]))
            case "logits":
                spans = tuple((start, stop, things[held]) for start, stop, held in call["spans"])
                rows = {name: arrays[name] for name in _BATCH}
                batch = RowBatch(spans=spans, decode_only=call["decode_only"], **rows)
                self._inner.logits(things[call["net"]], batch, arrays["tables"])
            case "beat":
                self._ranks.wait_for_all()

    def _adapt(self, call: dict[str, Any]) -> None:
        base, held = self._things[call["net"]], self._things.get(call["adapter"])
        tensors = self._fetch(call["version"])
        adapter = LoraAdapter(LoraSpec(**call["lora"]), base.config, tensors, base.parallel)
        if held is not None:
            for name, tensor in held.tensors.items():
                tensor.copy_(adapter.tensors[name])
            adapter = held
        self._things[call["adapter"]] = adapter
        self._inner.prepare_adapter(base, adapter)


def _decoded(data: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    size = int.from_bytes(data[:4], "little")
    call = json.loads(data[4 : 4 + size])
    at, arrays = 4 + size, {}
    for name, (dtype, shape) in call["arrays"].items():
        count = int(np.prod(shape))
        # A copy: compiled code takes aligned memory for granted.
        arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape).copy()
        at += count * np.dtype(dtype).itemsize
    return call, arrays
