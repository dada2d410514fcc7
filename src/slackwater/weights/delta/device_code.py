"""Device code that is compiled on first use, for the GPU at hand (NVRTC), and called by name."""

import ctypes
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from torch import Tensor

from slackwater.model.errors import UnavailableError

_SOURCE = "device.cu"


class DeviceCode:
    """The kernels of `device.cu`; tensors are passed by address, numbers as 64 bits."""

    def __init__(self, device: torch.device, constants: dict[str, int]) -> None:
        torch.zeros(1, device=device)  # makes the device's context current
        major, minor = torch.cuda.get_device_capability(device)
        options = [f"--gpu-architecture=sm_{major}{minor}", "-std=c++17"]
        options += [f"-D{name}={value}" for name, value in constants.items()]
        self._module = _done(driver.cuModuleLoadData(_compiled(options)))
        self._kernels: dict[str, Any] = {}

    def __call__(
        self, name: str, blocks: int, *arguments: Tensor | int, threads: int = 256
    ) -> None:
        """Run a kernel on the current stream."""
        if name not in self._kernels:
            found = _done(driver.cuModuleGetFunction(self._module, name.encode()))
            self._kernels[name] = found
        values = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
        kinds = tuple(
            ctypes.c_void_p if isinstance(a, Tensor) else ctypes.c_longlong for a in arguments
        )
        stream = torch.cuda.current_stream().cuda_stream
        shape = (blocks, 1, 1, threads, 1, 1)
        _done(driver.cuLaunchKernel(self._kernels[name], *shape, 0, stream, (values, kinds), 0))


@cache
def device_code(device: torch.device, **constants: int) -> DeviceCode:
    """Compiled once a process."""
    return DeviceCode(device, constants)


def _compiled(options: list[str]) -> bytes:
    source = files(__package__).joinpath(_SOURCE).read_bytes()
    program = _done(nvrtc.nvrtcCreateProgram(source, _SOURCE.encode(), 0, [], []))
    result = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if int(result[0]):
        said = b" " * int(_done(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, said)
        raise UnavailableError(f"{_SOURCE} does not compile for this GPU: {said.decode()[:2000]}")
    code = b" " * int(_done(nvrtc.nvrtcGetCUBINSize(program)))
    _done(nvrtc.nvrtcGetCUBIN(program, code))
    return code


def _done(answer: tuple[Any, ...]) -> Any:
    """The result of a call, or its error raised."""
    if int(answer[0]):
        raise UnavailableError(f"the GPU's driver refused a call of the delta codec: {answer[0]}")
    return answer[1] if len(answer) > 1 else None
