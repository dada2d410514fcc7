"""Physical pages on a GPU, through the CUDA driver's virtual memory calls."""

from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

from slackwater.engine.pages import PageArena
from slackwater.model.errors import ConfigError, RefusedError


class CudaPagePool:
    """Device memory in pages, created once each and mapped into arenas."""

    def __init__(self, capacity_bytes: int, page_bytes: int, device: torch.device) -> None:
        torch.zeros(1, device=device)  # makes the device's context current
        place = driver.CUmemLocation()
        place.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        place.id = device.index or 0
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location = place
        self._access = driver.CUmemAccessDesc()
        self._access.location = place
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        grain = int(_check_status(driver.cuMemGetAllocationGranularity(self._kind, minimum)))
        if page_bytes % grain:
            raise ConfigError.of("page_bytes", page_bytes, f"must be a multiple of {grain} here")
        self.page_bytes = page_bytes
        self.capacity = max(1, capacity_bytes // page_bytes)
        self._grain = grain
        self._handles: dict[int, Any] = {}
        self._free: list[int] = []
        self._pages = self._aside = 0

    def take(self) -> int | None:
        if self._free:
            return self._free.pop()
        if len(self._handles) + self._aside >= self.capacity:
            return None
        status, handle = driver.cuMemCreate(self.page_bytes, self._kind, 0)
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY and self._handles:
            return None  # a loan's weights still occupy memory that was set aside
        self._pages += 1
        self._handles[self._pages] = _check_status((status, handle))
        return self._pages

    def give_back(self, page: int) -> None:
        self._free.append(page)

    def reserve(self, size_bytes: int) -> int:
        return int(_check_status(driver.cuMemAddressReserve(size_bytes, self._grain, 0, 0)))

    def release(self, address: int, size_bytes: int) -> None:
        _check_status(driver.cuMemAddressFree(address, size_bytes))

    def map(self, pages: Sequence[int], address: int) -> None:
        size, place = self.page_bytes, address
        for page in pages:
            _check_status(driver.cuMemMap(place, size, 0, self._handles[page], 0))
            place += size
        _check_status(driver.cuMemSetAccess(address, len(pages) * size, [self._access], 1))

    def unmap(self, address: int, count: int) -> None:
        _check_status(driver.cuMemUnmap(address, count * self.page_bytes))

    def quiesce(self) -> None:
        """Wait for the kernels that may still read a page."""
        torch.cuda.synchronize()

    def trim(self) -> None:
        """Device memory stays reserved for the pool."""

    @property
    def unclaimed_bytes(self) -> int:
        return (self.capacity - len(self._handles)) * self.page_bytes

    def set_aside(self, count: int) -> bool:
        self._aside = 0
        if count > len(self._free) + self.capacity - len(self._handles):
            return False
        while len(self._handles) + count > self.capacity:
            _check_status(driver.cuMemRelease(self._handles.pop(self._free.pop())))
        self._aside = count
        return True

    def close(self) -> None:
        for handle in self._handles.values():
            _check_status(driver.cuMemRelease(handle))
        self._handles, self._free = {}, []


class _Range:
    """An address range with the interface through which PyTorch views it without a copy."""

    def __init__(self, address: int, elements: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (elements,),
            "typestr": "<i2",
            "data": (address, False),
            "version": 3,
        }


def device_view(arena: PageArena, device: torch.device) -> Tensor:
    """The whole range as 16-bit integers; its first page must be held."""
    return torch.as_tensor(_Range(arena.address, arena.size_bytes // 2), device=device)


def _check_status(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call; raises the driver's error."""
    status = answer[0]
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RefusedError(f"CUDA memory: {status.name}; lower kv_bytes or free device memory")
    return answer[1] if len(answer) > 1 else None
