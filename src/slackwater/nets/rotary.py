"""Rotary positions: cosines and sines by position, in one table."""

import math

import torch
from torch import Tensor

from slackwater.nets.config import NetConfig, RopeScaling


def inverse_frequencies(config: NetConfig) -> Tensor:
    """One frequency per pair of head dimensions, float32 on the CPU, scaled as configured."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _by_wavelength(frequencies, scaling)


def _by_wavelength(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    original = scaling.original_max_positions
    longest_kept = original / scaling.high_freq_factor
    shortest_stretched = original / scaling.low_freq_factor
    wavelengths = 2 * math.pi / frequencies
    stretched = frequencies / scaling.factor
    blend = (original / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - blend) * stretched + blend * frequencies
    result = torch.where(wavelengths > shortest_stretched, stretched, frequencies)
    medium = (wavelengths <= shortest_stretched) & (wavelengths >= longest_kept)
    return torch.where(medium, between, result)


class RotaryTable:
    """Cosines and sines of every position so far, `[positions, head_dim / 2]` each."""

    def __init__(self, config: NetConfig) -> None:
        self._config = config
        self._cos = torch.empty(0)
        self._sin = torch.empty(0)

    def reserve(self, positions: int, device: torch.device, dtype: torch.dtype) -> None:
        """Fill the table up to `positions`, on the device and in the type of the model."""
        if self._cos.shape[0] >= positions and (self._cos.device, self._cos.dtype) == (
            device,
            dtype,
        ):
            return
        rounded = max(256, 1 << (positions - 1).bit_length())
        angles = torch.outer(torch.arange(rounded).float(), inverse_frequencies(self._config))
        self._cos = angles.cos().to(device=device, dtype=dtype)
        self._sin = angles.sin().to(device=device, dtype=dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows for `positions`, within what was reserved."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Everything that was reserved, cosines and sines."""
        return self._cos, self._sin
