"""The weight port over a Mooncake Store, by URL: `mooncake://MASTER:PORT/PREFIX?host=ADDRESS&lend_mb=N`.

A version's buckets are objects of the store, its manifest the last of them, so a version is visible when all of it is there. `host` is
this process's address, `lend_mb` the memory that it adds to the store (0: it only reads and writes what others lend).

Hazards. The store is memory: what a holder lent is gone with it, a restarted master knows nothing, so it stands beside a durable store and
does not replace one. It authenticates nobody: give it a network of its own. It lists no keys: the names of versions are an object too,
written by one publisher of a prefix at a time.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import msgspec
import numpy as np
from torch import Tensor

from slackwater.model.errors import ConfigError, NotFoundError, RefusedError, UnavailableError
from slackwater.tensors.checked_file import checksum as crc32_of
from slackwater.tensors.header import TensorHeader
from slackwater.weights.relay.bucket import Manifest, part_checksums, tensor_memory, whole_views
from slackwater.weights.relay.host_copy import host_version, torch_tensors
from slackwater.weights.relay.manifest import BUCKET_BYTES
from slackwater.weights.relay.publisher import HostVersion, publish
from slackwater.weights.relay.shelf import Key

_BUFFER_BYTES = BUCKET_BYTES + (16 << 20)
_NAMES = "versions"


class _Record(msgspec.Struct, frozen=True):
    """What is kept of a version beside its buckets."""

    manifest: Manifest
    crc32: dict[str, int]


class MooncakeWeightStore:
    """Versions as objects of a Mooncake Store; for one thread."""

    def __init__(self, url: str, bucket_bytes: int = BUCKET_BYTES) -> None:
        parts = urlsplit(url)
        asked = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        try:
            port, lend = parts.port, int(asked.pop("lend_mb", "0"))
        except ValueError:
            port, lend = None, -1
        host = asked.pop("host", "127.0.0.1")
        if parts.scheme != "mooncake" or not parts.hostname or not port or asked or lend < 0:
            fix = "must be mooncake://MASTER:PORT/PREFIX?host=ADDRESS&lend_mb=N"
            raise ConfigError.of("weight store", url, fix)
        self._prefix = parts.path.strip("/") or "slackwater"
        self._bucket_bytes = bucket_bytes
        self._store = _connected(f"{parts.hostname}:{port}", host, lend << 20)
        self._staging = np.empty(bucket_bytes, np.uint8)
        address = self._staging.ctypes.data
        _done("register memory", self._store.register_buffer(address, bucket_bytes))

    def close(self) -> None:
        """Leave the store; what this process lent goes with it."""
        self._store.close()

    def publish(
        self,
        version: str,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        durable: bool = True,
    ) -> None:
        """Make the version visible, whole. Publishing the same again is nothing; other bytes are refused. Never durable."""
        del durable
        sums = {name: crc32_of(tensor.detach().cpu()) for name, tensor in tensors.items()}
        held = self._record(version)
        if held is not None:
            if held.crc32 != sums:
                raise RefusedError(
                    f"version: {version!r} is published with other weights; publish under a new name"
                )
            return
        manifest = publish(
            _Buckets(self), host_version(version, tensors, meta), None, self._bucket_bytes
        )
        self._put(self._key(version, "manifest"), msgspec.msgpack.encode(_Record(manifest, sums)))
        self._rename({*self.versions(), version})

    def pull(self, version: str, device: str = "cpu") -> dict[str, Tensor]:
        """The version's tensors, exactly as published."""
        manifest = self._present(version).manifest
        arrays = tensor_memory(tensor.size for tensor in manifest.tensors)
        for number, bucket in enumerate(manifest.buckets()):
            size = manifest.sizes[""][number]
            key = self._key(version, str(number))
            got = self._store.get_into(key, self._staging.ctypes.data, size)
            if got != size:
                raise UnavailableError(
                    f"mooncake: {key} gave {got}, not {size} bytes; its holder may be gone"
                )
            at = 0
            for view in whole_views(arrays, bucket):
                np.copyto(np.frombuffer(view, np.uint8), self._staging[at : at + len(view)])
                at += len(view)
            if tuple(part_checksums(arrays, bucket)) != manifest.checksums[number]:
                raise UnavailableError(f"mooncake: {key} has other bytes than its manifest says")
        found = HostVersion(version, manifest.tensors, arrays, manifest.meta)
        return torch_tensors(found, device)

    def manifest(self, version: str) -> TensorHeader:
        """The version's shapes, checksums and `meta`, without its tensors."""
        held = self._present(version)
        tensors = held.manifest.tensors
        return TensorHeader(
            dtypes={tensor.name: tensor.dtype for tensor in tensors},
            shapes={tensor.name: tensor.shape for tensor in tensors},
            crc32=held.crc32,
            meta=held.manifest.meta,
            file_bytes=held.manifest.bytes_of(""),
        )

    def versions(self) -> tuple[str, ...]:
        """Every visible version, by name."""
        names = self._store.get(f"{self._prefix}/{_NAMES}")
        return tuple(sorted(msgspec.msgpack.decode(names, type=list[str]))) if names else ()

    def retain(self, keep: Collection[str]) -> tuple[str, ...]:
        """Drop every version not named; returns those dropped."""
        held = self.versions()
        dropped = tuple(version for version in held if version not in keep)
        if dropped:
            self._rename({version for version in held if version in keep})
        for version in dropped:
            record = self._record(version)
            self._store.remove(self._key(version, "manifest"), True)
            for number in range(len(record.manifest.checksums) if record else 0):
                self._store.remove(self._key(version, str(number)), True)
        return dropped

    def put_bucket(self, key: Key, views: Sequence[memoryview]) -> None:
        """One bucket of a version that is being published; what a publisher left that died is replaced."""
        name = self._key(key.cargo.version, str(key.number))
        _done(f"put {name}", self._store.upsert_parts(name, *views))

    def _key(self, version: str, what: str) -> str:
        return f"{self._prefix}/{quote(version, safe='')}/{what}"

    def _put(self, key: str, data: bytes) -> None:
        _done(f"put {key}", self._store.upsert(key, data))

    def _rename(self, versions: Collection[str]) -> None:
        self._put(f"{self._prefix}/{_NAMES}", msgspec.msgpack.encode(sorted(versions)))

    def _record(self, version: str) -> _Record | None:
        data = self._store.get(self._key(version, "manifest"))
        if not data:
            return None
        try:
            found = msgspec.msgpack.decode(data, type=_Record)
        except msgspec.DecodeError as error:
            raise UnavailableError(
                f"mooncake: the manifest of {version!r} is damaged: {error}"
            ) from None
        found.manifest.check()
        return found

    def _present(self, version: str) -> _Record:
        found = self._record(version)
        if found is None:
            held = ", ".join(self.versions()[-5:]) or "none"
            raise NotFoundError(f"version: {version!r} is not in the store; it holds {held}")
        return found


class _Buckets:
    """Where the publisher puts buckets; the store's owner writes the manifest."""

    def __init__(self, store: MooncakeWeightStore) -> None:
        self._store = store

    def put(self, key: Key, size: int, tag: int, views: Sequence[memoryview]) -> None:
        del size, tag
        self._store.put_bucket(key, views)

    def seal(self, manifest: Manifest) -> None:
        """Nothing: the manifest is written with more beside it."""


def _connected(master: str, host: str, lend_bytes: int) -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        fix = f"needs the package mooncake-transfer-engine and libibverbs1: {error}"
        raise ConfigError.of("weight store", f"mooncake://{master}", fix) from None
    store = MooncakeDistributedStore()
    code = store.setup(host, "P2PHANDSHAKE", lend_bytes, _BUFFER_BYTES, "tcp", "", master)
    _done(f"connect to {master}", code)
    return store


def _done(what: str, code: int) -> None:
    if code:
        raise UnavailableError(f"mooncake: could not {what}: error {code}")
