"""Copies between a device region and a host image: plain on CPU, pinned with streams on CUDA."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from slackwater.model.errors import RefusedError
from slackwater.state.image import HostImage


@dataclass(frozen=True, slots=True)
class ByteRun:
    """So many bytes of a region, and where they are in an image."""

    image: HostImage
    on_device: int
    on_host: int
    bytes: int


class Copies(Protocol):
    """When a call returns, the bytes are there and safe to use."""

    def load(self, region: Tensor, runs: Sequence[ByteRun], blanks: Sequence[Tensor] = ()) -> None:
        """Zero the blanks, then fill the runs."""
        ...

    def fence(self) -> object:
        """What has been computed so far; `save` waits for it and for nothing later."""
        ...

    def save(self, region: Tensor, runs: Sequence[ByteRun], after: object) -> None: ...

    def forget(self, image: HostImage) -> None: ...


def copies_for(device: str) -> Copies:
    return CudaCopies(device) if device.startswith("cuda") else CpuCopies()


def host_bytes(image: HostImage) -> Tensor:
    """An image as a tensor over the same memory."""
    return torch.from_numpy(image.data)


class CpuCopies:
    """Memory to memory."""

    def load(self, region: Tensor, runs: Sequence[ByteRun], blanks: Sequence[Tensor] = ()) -> None:
        for blank in blanks:
            blank.zero_()
        for run in runs:
            host = host_bytes(run.image)[run.on_host : run.on_host + run.bytes]
            region[run.on_device : run.on_device + run.bytes].copy_(host)

    def fence(self) -> object:
        return None

    def save(self, region: Tensor, runs: Sequence[ByteRun], after: object) -> None:
        for run in runs:
            device = region[run.on_device : run.on_device + run.bytes]
            host_bytes(run.image)[run.on_host : run.on_host + run.bytes].copy_(device)

    def forget(self, image: HostImage) -> None:
        del image


class CudaCopies:
    """Images are pinned at first use; loads and saves have a stream each beside the compute."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._in: Any = torch.cuda.Stream(self.device)
        self._out: Any = torch.cuda.Stream(self.device)
        self._pinned: dict[int, Tensor] = {}

    def pin(self, image: HostImage) -> Tensor:
        """The image's memory, pinned in this process; the manager owns the pages."""
        known = self._pinned.get(id(image))
        if known is None:
            whole = torch.from_numpy(image.pages)
            status: Any = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)
            if int(status):
                raise RefusedError(
                    f"host memory: {whole.nbytes} bytes cannot be pinned (CUDA error "
                    f"{int(status)}); lower the host budget"
                )
            known = self._pinned[id(image)] = whole
        return known

    def load(self, region: Tensor, runs: Sequence[ByteRun], blanks: Sequence[Tensor] = ()) -> None:
        with torch.cuda.stream(self._in):
            for blank in blanks:
                blank.zero_()
            for run in runs:
                host = self.pin(run.image)[run.on_host : run.on_host + run.bytes]
                region[run.on_device : run.on_device + run.bytes].copy_(host, non_blocking=True)
        self._in.synchronize()

    def fence(self) -> object:
        event: Any = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def save(self, region: Tensor, runs: Sequence[ByteRun], after: Any) -> None:
        with torch.cuda.stream(self._out):
            if after is not None:
                self._out.wait_event(after)
            for run in runs:
                host = self.pin(run.image)[run.on_host : run.on_host + run.bytes]
                host.copy_(region[run.on_device : run.on_device + run.bytes], non_blocking=True)
        self._out.synchronize()

    def forget(self, image: HostImage) -> None:
        """Unpin, before the image's memory goes."""
        whole = self._pinned.pop(id(image), None)
        if whole is not None:
            torch.cuda.cudart().cudaHostUnregister(whole.data_ptr())
