"""A file that lists a service's instances, for `slackwater up --instances FILE`:

[[instances]]
name = "gpu-a"
engine = "vllm"                        # or sglang; else an engine of this machine
url = "http://10.0.0.7:8000"           # a server that runs there; without it one is started

[[instances]]
name = "large"
engine = "vllm"
tp = 4                                 # devices of a node that it has: tensor parallel

[[instances]]
name = "spare"
kind = "spot"                          # else dedicated
model = "qwen"                         # needed where the service has several
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slackwater.model.config import decode
from slackwater.model.errors import ConfigError
from slackwater.model.instance import EngineName, InstanceKind
from slackwater.model.toml_text import read_toml
from slackwater.runtime.launch.fleet_file import check_unique
from slackwater.runtime.launch.port import ENGINE, ENGINE_SERVER, WorkerPlan

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

PROGRAM_VARIABLES = {"vllm": "SLACKWATER_VLLM", "sglang": "SLACKWATER_SGLANG"}


@dataclass(frozen=True, slots=True)
class InstanceRequest:
    """What to start: an embedded engine of a model, or the adapter of a vLLM or SGLang server.

    That is the server at `url`, or one of its own that it starts with the program that
    SLACKWATER_VLLM or SLACKWATER_SGLANG names. With `tp` an engine, or a server of its own, has so
    many devices of a node.
    """

    model: str
    kind: InstanceKind = InstanceKind.SPOT
    engine: EngineName = "embedded"
    url: str | None = None
    tp: int = 1

    def __post_init__(self) -> None:
        if self.url is not None and self.engine == "embedded":
            raise ConfigError.of("url", self.url, "needs engine: vllm or sglang")
        if self.tp < 1:
            raise ConfigError.of("tp", self.tp, "must be at least 1")
        if self.tp > 1 and self.url is not None:
            fix = f"is of the server at {self.url}; start that with --tensor-parallel-size"
            raise ConfigError.of("tp", self.tp, fix)

    def plan(self, name: str, common: tuple[str, ...]) -> WorkerPlan:
        """Its worker, which is told what is `common` to engines of its model; a server elsewhere
        needs none of our devices, and one of its own has all of its devices in one process tree.
        """
        module, arguments = self.worker()
        layout = f"tp={self.tp}" if self.tp > 1 else ""
        return WorkerPlan(
            name,
            module,
            (*common, *arguments),
            layout=layout if self.url is None else None,
            one_process=self.engine != "embedded",
        )

    def worker(self) -> tuple[str, tuple[str, ...]]:
        """The worker's module and what it is told beside its model."""
        arguments: tuple[str, ...] = ("--kind", self.kind.value)
        if self.engine == "embedded":
            return ENGINE, arguments
        arguments += ("--engine", self.engine)
        if self.url is not None:
            return ENGINE_SERVER, (*arguments, "--url", self.url)
        variable = PROGRAM_VARIABLES[self.engine]
        program = os.environ.get(variable)
        if program is None:
            fix = f"must be given, or `slackwater up` be started with {variable} set"
            raise ConfigError.of("url", None, fix)
        ranks = (f"--server-options=--tensor-parallel-size {self.tp}",) if self.tp > 1 else ()
        return ENGINE_SERVER, (*arguments, "--program", program, *ranks)


@dataclass(frozen=True, slots=True)
class ListedInstance:
    """One entry of the list."""

    name: str
    kind: InstanceKind = InstanceKind.DEDICATED
    model: str | None = None
    engine: EngineName = "embedded"
    url: str | None = None
    tp: int = 1

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            fix = "must be letters, digits, '.', '_' and '-', 64 at most"
            raise ConfigError.of("instances: name", self.name, fix)
        if self.kind is InstanceKind.LOCAL:
            fix = "must be dedicated, spot or borrowed; local ones are training nodes"
            raise ConfigError.of(f"instances: {self.name}: kind", self.kind.value, fix)
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            fix = "must begin with http:// or https://"
            raise ConfigError.of(f"instances: {self.name}: url", self.url, fix)
        if self.tp < 1:
            raise ConfigError.of(f"instances: {self.name}: tp", self.tp, "must be at least 1")

    def request(self, models: Sequence[str]) -> InstanceRequest:
        """The request for this instance in a service that has these models."""
        model = self.model or (models[0] if len(models) == 1 else None)
        if model is None or model not in models:
            fix = f"must be one of: {', '.join(models)}"
            raise ConfigError.of(f"instances: {self.name}: model", self.model, fix)
        return InstanceRequest(model, self.kind, self.engine, self.url, self.tp)


@dataclass(frozen=True, slots=True)
class InstanceList:
    """The whole file."""

    instances: tuple[ListedInstance, ...] = ()

    def __post_init__(self) -> None:
        check_unique("instances", [entry.name for entry in self.instances])


def read_instance_list(file: Path) -> InstanceList:
    """The list, or an error that names what is wrong with it."""
    table = read_toml("--instances", file)
    for entry in table.get("instances", ()):
        if isinstance(entry, dict) and "vllm_url" in entry:  # an older name of these two
            entry |= {"engine": "vllm", "url": entry.pop("vllm_url")}
    return decode(InstanceList, table)
