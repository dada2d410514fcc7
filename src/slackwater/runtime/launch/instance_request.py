"""What an instance beside those that are always kept should be."""

import os
from dataclasses import dataclass
from typing import Literal

from slackwater.model.errors import ConfigError
from slackwater.model.instance import InstanceKind

VLLM_VARIABLE = "SLACKWATER_VLLM"


@dataclass(frozen=True, slots=True)
class InstanceRequest:
    """What to start: an embedded engine of a model, or the adapter of a vLLM server.

    That is the server at `vllm_url`, or one of its own that it starts with the program
    `SLACKWATER_VLLM`.
    """

    model: str
    kind: InstanceKind = InstanceKind.SPOT
    engine: Literal["embedded", "vllm"] = "embedded"
    vllm_url: str | None = None

    @property
    def layout(self) -> str | None:
        """Of its deployment; a server elsewhere needs none of our devices."""
        return "" if self.vllm_url is None else None

    def worker(self) -> tuple[str, tuple[str, ...]]:
        """The worker's module and what it is told beside its model."""
        arguments = ("--kind", self.kind.value)
        if self.engine == "embedded":
            return "slackwater.worker.engine_worker", arguments
        if self.vllm_url is not None:
            return "slackwater.worker.vllm.adapter", (*arguments, "--url", self.vllm_url)
        program = os.environ.get(VLLM_VARIABLE)
        if program is None:
            fix = f"must be given, or `slackwater up` be started with {VLLM_VARIABLE} set"
            raise ConfigError.of("vllm_url", None, fix)
        return "slackwater.worker.vllm.adapter", (*arguments, "--vllm", program)
