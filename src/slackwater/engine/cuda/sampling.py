"""Sampling on CUDA: one kernel for all rows, and a sort for rows with top-k or top-p."""

import numpy as np
import torch
import triton
from torch import Tensor

from slackwater.engine.cuda.row_kernels import chunk_kernel, sample_kernel
from slackwater.engine.executor import Sampled, SamplingColumns

_BLOCK = 4096


def launch_sampling(logits: Tensor, temperature: Tensor, uniform: Tensor, answer: Tensor) -> None:
    """Write each row's token, and the bits of its log-prob, to the two lines of `answer`."""
    (rows, vocab), stride = logits.shape, logits.stride(0)
    chunks = triton.cdiv(vocab, _BLOCK)
    tops, sums = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    chunk_kernel[(rows, chunks)](
        logits, temperature, tops, sums, places, stride, vocab, chunks, BLOCK=_BLOCK, num_warps=8
    )
    sample_kernel[(rows,)](
        logits, temperature, uniform, tops, sums, places, answer[0], answer[1].view(torch.float32),
        stride, vocab, chunks,
        BLOCK=_BLOCK, CHUNKS=triton.next_power_of_2(chunks),
        num_warps=8,
    )  # fmt: skip


class CudaSampler:
    """Samples from logits of any float type into host arrays."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @torch.inference_mode()
    def sample(self, logits: Tensor, columns: SamplingColumns) -> Sampled:
        numbers = torch.from_numpy(np.stack((columns.temperature, columns.uniform)))
        numbers = numbers.to(self._device)
        answer = torch.empty(2, len(logits), dtype=torch.int32, device=self._device)
        launch_sampling(logits, numbers[0], numbers[1], answer)
        self.truncate(logits, columns, answer)
        host = answer.cpu().numpy()
        return host[0].astype(np.int64), host[1].view(np.float32)

    def truncate(self, logits: Tensor, columns: SamplingColumns, answer: Tensor) -> None:
        """Sample rows with top-k or top-p again, among the tokens that these leave."""
        cut = (columns.temperature > 0) & ((columns.top_k > 0) | (columns.top_p < 1))
        if not cut.any():
            return
        rows = np.nonzero(cut)[0]
        at = torch.from_numpy(rows).to(self._device)
        heat = torch.from_numpy(columns.temperature[rows]).to(self._device)[:, None]
        logprobs = torch.log_softmax(logits[at].float() / heat, -1)
        ordered, ids = logprobs.sort(dim=-1, descending=True, stable=True)
        weights = ordered.exp()
        limit = torch.from_numpy(columns.top_k[rows]).to(self._device)[:, None]
        rank = torch.arange(weights.shape[1], device=self._device)[None, :]
        weights = weights.masked_fill((limit > 0) & (rank >= limit), 0.0)
        before = weights.cumsum(-1) - weights
        top_p = torch.from_numpy(columns.top_p[rows]).to(self._device)[:, None]
        weights = weights.masked_fill(before >= top_p * weights.sum(-1, keepdim=True), 0.0)
        running = weights.cumsum(-1)
        uniform = torch.from_numpy(columns.uniform[rows]).to(self._device)[:, None]
        place = (running <= uniform * running[:, -1:]).sum(-1, keepdim=True)
        place = torch.minimum(place, (weights > 0).sum(-1, keepdim=True) - 1)
        answer[0, at] = ids.gather(1, place)[:, 0].to(torch.int32)
        answer[1, at] = logprobs.gather(1, ids.gather(1, place))[:, 0].view(torch.int32)
