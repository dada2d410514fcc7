"""The weight port over a relay: versions travel in buckets, whole or as what changed."""

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from slackwater.model.errors import NotFoundError, SlackwaterError
from slackwater.policy.weights.retention import RetentionByNeed, Shelf
from slackwater.policy.weights.way import Delta
from slackwater.tensors.header import TensorHeader
from slackwater.weights.relay.agent import Agent
from slackwater.weights.relay.bucket import BUCKET_BYTES, Bytes, Cargo, Manifest, TensorEntry
from slackwater.weights.relay.client import Address, RelayClient
from slackwater.weights.relay.publisher import HostVersion, publish
from slackwater.weights.relay.receiver import Receiver

logger = logging.getLogger(__name__)

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "F32": torch.float32, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
_BASES = 4  # models whose last version is kept to find out what changed
_CHAIN = 16  # versions whose deltas stay on the relay
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def host_version(
    version: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> HostVersion:
    """A copy of the tensors in host memory, in the order of their names."""
    entries: list[TensorEntry] = []
    arrays: list[Bytes] = []
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        entries.append(TensorEntry(name, _NAMES[tensor.dtype], tuple(tensor.shape)))
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        host.copy_(tensor)
        arrays.append(host.reshape(-1).view(torch.uint8).numpy())
    return HostVersion(version, tuple(entries), tuple(arrays), dict(meta))


def torch_tensors(held: HostVersion, device: str = "cpu") -> dict[str, Tensor]:
    """The version's tensors; on the CPU they are the version's own memory, not to be changed."""
    found: dict[str, Tensor] = {}
    for entry, array in zip(held.tensors, held.arrays, strict=True):
        flat = torch.from_numpy(array) if len(array) else torch.empty(0, dtype=torch.uint8)
        found[entry.name] = flat.view(_DTYPES[entry.dtype]).reshape(entry.shape).to(device)
    return found


class RelayWeightStore:
    """Publishes to a relay and pulls through an agent of its own.

    `publish` returns when the tensors are copied; encoding and sending go on beside the caller, in order. A pull
    waits up to `pull_within_s` for its version to become visible and to come. What it sent earlier goes from the relay as newer
    versions take its place.
    """

    def __init__(
        self,
        relay: Address,
        secret: bytes,
        member: str,
        *,
        node: str,
        site: str = "",
        host: str = "127.0.0.1",
        max_bytes: int = 64 << 30,
        bucket_bytes: int = BUCKET_BYTES,
        pull_within_s: float = 600.0,
    ) -> None:
        self._relay, self._secret = relay, secret
        self._bucket_bytes, self._within_s = bucket_bytes, pull_within_s
        self._agent = Agent(
            relay, secret, member, node=node, site=site, max_bytes=max_bytes, host=host
        )
        self._receiver = Receiver(self._agent)
        self._last: OrderedDict[tuple[TensorEntry, ...], HostVersion] = OrderedDict()
        self._sent: list[Manifest] = []
        self._to_send: queue.Queue[HostVersion | None] = queue.Queue(maxsize=1)
        self._failure: SlackwaterError | None = None
        self._sender = threading.Thread(target=self._send, name="weight sender", daemon=True)
        self._sender.start()

    def publish(
        self,
        version: str,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        durable: bool = True,
    ) -> None:
        """Copy the tensors, and have them sent. The error of an earlier sending is raised here.

        A relay holds versions in memory; `durable` asks for no more than that.
        """
        del durable
        self._raise_failure()
        self._to_send.put(host_version(version, tensors, meta))

    def flush(self) -> None:
        """Wait until all that was published is visible."""
        self._to_send.join()
        self._raise_failure()

    def pull(self, version: str, device: str = "cpu") -> dict[str, Tensor]:
        """The version's tensors, exactly as published."""
        return torch_tensors(self._receiver.pull(version, self._within_s), device)

    def manifest(self, version: str) -> TensorHeader:
        """The version's shapes, checksums and `meta`, once it is visible."""
        return _header(self._agent.manifest(version, self._within_s))

    def shows(self, version: str, wait_s: float) -> bool:
        """Whether the version is visible, or becomes so in a while."""
        try:
            self._agent.manifest(version, wait_s)
        except NotFoundError:
            return False
        return True

    def versions(self) -> tuple[str, ...]:
        """Every visible version, oldest first."""
        return tuple(line.version for line in self._agent.versions())

    def retain(self, keep: Collection[str]) -> tuple[str, ...]:
        """Drop every version not named, and the deltas that no way needs; returns the versions dropped."""
        lines = self._agent.versions()
        order = tuple(line.version for line in lines)
        wholes = {line.version: line.sizes[""] for line in lines if "" in line.sizes}
        deltas = [
            Delta(base, line.version, size)
            for line in lines
            for base, size in line.sizes.items()
            if base
        ]
        kept = set(keep)
        shelf = Shelf(order, wholes, deltas, pinned=kept, held=kept | {*self._receiver.held()})
        drops = RetentionByNeed(keep_newest=0).decide(shelf)
        with RelayClient(self._relay, self._secret) as client:
            for version in drops.wholes:
                client.drop(Cargo(version))
            for delta in drops.deltas:
                client.drop(Cargo(delta.version, delta.base))
        left = {line.version for line in self._agent.versions()}
        return tuple(version for version in order if version not in left)

    def close(self) -> None:
        """Send what is waiting, then leave."""
        self._to_send.put(None)
        self._sender.join()
        self._agent.close()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _send(self) -> None:
        while (new := self._to_send.get()) is not None:
            try:
                with RelayClient(self._relay, self._secret) as client:
                    base = self._last.pop(new.tensors, None)
                    self._sent.append(publish(client, new, base, self._bucket_bytes))
                    self._make_room(client)
                self._last[new.tensors] = new
                while len(self._last) > _BASES:
                    self._last.popitem(last=False)
            except SlackwaterError as error:
                logger.warning("version not published version=%s: %s", new.version, error)
                self._failure = error
            finally:
                self._to_send.task_done()

    def _make_room(self, client: RelayClient) -> None:
        """Of what this store sent: wholes but the newest of each model go, and in time the deltas too."""
        newest = {manifest.tensors: manifest.version for manifest in self._sent}
        kept: list[Manifest] = []
        for place, manifest in enumerate(self._sent):
            old = place < len(self._sent) - _CHAIN
            for base in manifest.sizes:
                if old or (base == "" and newest[manifest.tensors] != manifest.version):
                    client.drop(Cargo(manifest.version, base))
            if not old:
                kept.append(manifest)
        self._sent = kept


def _header(manifest: Manifest) -> TensorHeader:
    sums = dict.fromkeys((entry.name for entry in manifest.tensors), 0)
    for bucket, checksums in zip(manifest.buckets(), manifest.checksums, strict=True):
        for part, part_sum in zip(bucket, checksums, strict=True):
            name = manifest.tensors[part.tensor].name
            sums[name] = (sums[name] * 31 + part_sum) & 0xFFFFFFFF
    return TensorHeader(
        dtypes={entry.name: entry.dtype for entry in manifest.tensors},
        shapes={entry.name: entry.shape for entry in manifest.tensors},
        crc32=sums,
        meta=manifest.meta,
        file_bytes=sum(entry.size for entry in manifest.tensors),
    )
