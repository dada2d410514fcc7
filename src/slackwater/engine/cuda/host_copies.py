"""Weights from pageable host memory to the device: through pinned buffers, by several threads,
beside the running steps.
"""

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

_PIECE = 8 << 20
_BUFFERS = 12
_THREADS = 6


class HostCopies:
    """Copies on a stream of its own; the buffers are pinned once, when first wanted, and kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: queue.SimpleQueue[tuple[Tensor, Any]] = queue.SimpleQueue()
        self._stream: Any = None

    def run(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Make each first tensor what the second is; returns when all are. Steps queued before are
        not overtaken.
        """
        if self._stream is None:
            self._prepare()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        pieces = []
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                if _plain(target, source):
                    bytes_of = [x.detach().view(-1).view(torch.uint8) for x in (target, source)]
                    pieces += list(zip(*(x.split(_PIECE) for x in bytes_of), strict=True))
                else:
                    target.detach().copy_(source)
        with ThreadPoolExecutor(_THREADS, "weights to the device") as pool:
            for _ in pool.map(lambda pair: self._copy(*pair), pieces):
                pass
        self._stream.synchronize()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        host, sent = self._buffers.get()
        sent.synchronize()
        part = host[: len(source)].copy_(source)
        with torch.cuda.stream(self._stream):
            target.copy_(part, non_blocking=True)
            sent.record()
        self._buffers.put((host, sent))

    def _prepare(self) -> None:
        new_stream: Any = torch.cuda.Stream
        new_event: Any = torch.cuda.Event
        self._stream = new_stream(self._device)
        for _ in range(_BUFFERS):
            host = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)
            self._buffers.put((host, new_event()))


def _plain(target: Tensor, source: Tensor) -> bool:
    """Whether the bytes can go as they are."""
    alike = source.dtype == target.dtype and source.shape == target.shape
    laid_out = source.is_contiguous() and target.is_contiguous()
    return source.device.type == "cpu" and alike and laid_out
