"""A rollout model's weights on the host while its job does not roll out, ready for the device."""

from collections.abc import Mapping

import torch
from torch import Tensor

from slackwater.model.errors import RefusedError
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import empty_net, net_tensors


class StagedWeights:
    """Pinned if the device is a GPU, so that they are copied at link speed."""

    def __init__(
        self, config: NetConfig, tensors: Mapping[str, Tensor], device: torch.device | str
    ) -> None:
        self.config = config
        self._device = torch.device(device)
        pins = self._device.type == "cuda"
        self._tensors = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins).copy_(tensor)
            for name, tensor in tensors.items()
        }

    @classmethod
    def from_net(cls, net: CausalLM, device: torch.device | str) -> "StagedWeights":
        """Copy a model's weights off its device."""
        return cls(net.config, net_tensors(net), device)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    def lacking_bytes(self, unclaimed_bytes: int) -> int:
        """How many bytes the device lacks for them, if `unclaimed_bytes` are reserved elsewhere."""
        if self._device.type != "cuda":
            return 0
        return max(self.size_bytes - self._free_bytes() + unclaimed_bytes, 0)

    def _free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(free + kept)

    def on_device(self) -> CausalLM:
        """Load the model onto its device. Raises if the free memory is too small."""
        if self._device.type == "cuda" and self.size_bytes > self._free_bytes():
            raise RefusedError(
                f"the rollout's weights need {self.size_bytes / 1e9:.1f} GB and"
                f" {self._free_bytes() / 1e9:.1f} are free: lower kv_bytes, or lend to a smaller "
                "model"
            )
        dtype = next(iter(self._tensors.values())).dtype
        net = empty_net(self.config, dtype, self._device)
        with torch.no_grad():
            for name, target in net_tensors(net).items():
                target.copy_(self._tensors[name], non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return net
