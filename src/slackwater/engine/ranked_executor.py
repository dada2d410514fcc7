"""An engine on several ranks: rank 0 schedules and samples, every rank computes its part.

Rank 0 broadcasts each call of its executor to the others; the calls then meet in their collectives.
Only the name of a weight version is sent: each rank fetches its own slices.
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

from slackwater.engine.executor import Executor, RowBatch, Sampled, SamplingColumns
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.loading import empty_like
from slackwater.nets.lora import LoraAdapter, LoraSpec
from slackwater.nets.ranks import Ranks

Fetch = Callable[[str], Mapping[str, Tensor]]
_BATCH = ("tokens", "positions", "slots", "logit_rows")


class RankSlices(dict[str, Tensor]):
    """One rank's slices of a version; the other ranks fetch theirs by the version's name."""

    def __init__(self, version: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.version = version


class RankedExecutor(Executor):
    """Rank 0's executor: `inner` computes rank 0's own part.

    Calls may come from two threads (see `Executor.write`); the ranks execute them one by one.
    """

    def __init__(self, inner: Executor, ranks: Ranks) -> None:
        self._inner, self._ranks = inner, ranks
        self.block_tokens, self.block_bytes = inner.block_tokens, inner.block_bytes
        self.arena = inner.arena
        # Nets and adapters with their numbers, by `id`. Keeping the object keeps its id unique.
        self._objects: dict[int, tuple[int, object]] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()

    def prepare(self, net: CausalLM) -> None:
        with self._lock:
            self._broadcast_call("prepare", {"net": self._number(net)})
            self._inner.prepare(net)

    def write(self, net: CausalLM, tensors: Mapping[str, Tensor]) -> None:
        assert isinstance(tensors, RankSlices), "the other ranks fetch a version by its name"
        with self._lock:
            self._broadcast_call("write", {"net": self._number(net), "version": tensors.version})
        self._inner.write(net, tensors)  # without the lock: steps are broadcast meanwhile

    def prepare_adapter(self, net: CausalLM, adapter: LoraAdapter) -> None:
        version, lora = adapter.version, asdict(adapter.spec)
        with self._lock:
            numbers = {"net": self._number(net), "adapter": self._number(adapter)}
            self._broadcast_call("adapt", {**numbers, "version": version, "lora": lora})
            self._inner.prepare_adapter(net, adapter)

    def drop_adapter(self, adapter: LoraAdapter) -> None:
        with self._lock:
            self._broadcast_call("drop", {"adapter": self._number(adapter)})
            del self._objects[id(adapter)]
            self._inner.drop_adapter(adapter)

    def logits(self, net: CausalLM, batch: RowBatch, tables: NDArray[np.int32]) -> Tensor:
        spans = [[start, stop, self._number(adapter)] for start, stop, adapter in batch.spans]
        arrays = {name: getattr(batch, name) for name in _BATCH} | {"tables": tables}
        with self._lock:
            fields = {"net": self._number(net), "spans": spans, "decode_only": batch.decode_only}
            self._broadcast_call("logits", fields, arrays)
            return self._inner.logits(net, batch, tables)

    def sample(self, logits: Tensor, columns: SamplingColumns) -> Sampled:
        return self._inner.sample(logits, columns)

    def send_heartbeat(self) -> None:
        """Send this regularly while idle: the other ranks wait for a call with a deadline."""
        with self._lock:
            self._broadcast_call("beat", {})
            self._ranks.wait_for_all()

    def close(self) -> None:
        with self._lock:
            self._broadcast_call("close", {})
            self._inner.close()

    def _number(self, obj: object) -> int:
        if id(obj) not in self._objects:
            self._objects[id(obj)] = (next(self._numbers), obj)
        return self._objects[id(obj)][0]

    def _broadcast_call(
        self,
        call: str,
        fields: Mapping[str, object],
        arrays: Mapping[str, NDArray[Any]] = MappingProxyType({}),
    ) -> None:
        shapes = {name: [str(array.dtype), list(array.shape)] for name, array in arrays.items()}
        head = json.dumps({"call": call, "arrays": shapes, **fields}).encode()
        body = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
        self._ranks.broadcast(len(head).to_bytes(4, "little") + head + body)


class RankFollower:
    """Any other rank: repeats rank 0's executor calls on its own part of the model."""

    def __init__(self, base: CausalLM, inner: Executor, ranks: Ranks, fetch: Fetch) -> None:
        self._base, self._inner, self._ranks, self._fetch = base, inner, ranks, fetch
        self._objects: dict[int, Any] = {}
        # Rank 0's block pool decides which blocks are used. Holding all of them here costs nothing
        # up front: memory is allocated when a block is first touched.
        held = inner.arena.hold(0, inner.arena.size_bytes)
        assert held, "an arena is no larger than its pool"

    def run(self) -> None:
        """Execute rank 0's calls until it closes its executor."""
        while True:
            call, arrays = _parse_call(self._ranks.broadcast(None))
            if call["call"] == "close":
                self._inner.close()
                return
            self._execute(call, arrays)

    def _execute(self, call: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        objects = self._objects
        match call["call"]:
            case "prepare":
                net = empty_like(self._base) if objects else self._base
                objects[call["net"]] = net
                self._inner.prepare(net)
            case "write":
                self._inner.write(objects[call["net"]], self._fetch(call["version"]))
            case "adapt":
                self._adapt(call)
            case "drop":
                self._inner.drop_adapter(objects.pop(call["adapter"]))
            case "logits":
                spans = tuple((start, stop, objects[num]) for start, stop, num in call["spans"])
                rows = {name: arrays[name] for name in _BATCH}
                batch = RowBatch(spans=spans, decode_only=call["decode_only"], **rows)
                self._inner.logits(objects[call["net"]], batch, arrays["tables"])
            case "beat":
                self._ranks.wait_for_all()

    def _adapt(self, call: dict[str, Any]) -> None:
        base, existing = self._objects[call["net"]], self._objects.get(call["adapter"])
        tensors = self._fetch(call["version"])
        adapter = LoraAdapter(LoraSpec(**call["lora"]), base.config, tensors, base.parallel)
        if existing is not None:
            for name, tensor in existing.tensors.items():
                tensor.copy_(adapter.tensors[name])
            adapter = existing
        self._objects[call["adapter"]] = adapter
        self._inner.prepare_adapter(base, adapter)


def _parse_call(data: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    size = int.from_bytes(data[:4], "little")
    call = json.loads(data[4 : 4 + size])
    at, arrays = 4 + size, {}
    for name, (dtype, shape) in call["arrays"].items():
        count = int(np.prod(shape))
        # A copy: compiled code requires aligned memory.
        arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape).copy()
        at += count * np.dtype(dtype).itemsize
    return call, arrays
