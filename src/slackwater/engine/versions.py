"""Weight versions: a bounded number of full weights and adapters, all readable at once."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from slackwater.engine.config import EngineConfig
from slackwater.engine.executor import Executor
from slackwater.model.errors import ConfigError, NotFoundError, RefusedError
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.loading import empty_like, net_tensors
from slackwater.nets.lora import LoraAdapter, LoraSpec


@dataclass(slots=True)
class Version:
    """Full weights, or an adapter on the base weights.

    `generation` increases with a rewrite in place: prefixes cached before it are not reused.
    """

    net: CausalLM
    adapter: LoraAdapter | None
    generation: int
    users: int = 0


class VersionStore:
    """Versions by name. Adapters apply to the weights that the engine started with.

    Another thread may call `fill`; everything else is called between the engine's steps.
    """

    def __init__(self, net: CausalLM, config: EngineConfig, executor: Executor) -> None:
        self._base, self._config, self._executor = net, config, executor
        executor.prepare(net)
        self._shapes = {name: tensor.shape for name, tensor in net_tensors(net).items()}
        self._versions = {config.base_version: Version(net, None, 0)}
        self._spare: list[CausalLM] = []
        self._begun = 0
        self._generations = 0

    def __len__(self) -> int:
        return len(self._versions)

    def names(self) -> tuple[str, ...]:
        return tuple(self._versions)

    def get(self, version: str) -> Version:
        found = self._versions.get(version)
        if found is None:
            held = ", ".join(sorted(self._versions))
            raise NotFoundError(f"version: {version!r} is not held; held are: {held}")
        return found

    def put(
        self, version: str, tensors: Mapping[str, Tensor], *, lora: LoraSpec | None = None
    ) -> None:
        """Add full weights or an adapter of the base, or rewrite a version in place.

        After a rewrite, running requests continue with the new weights, and later requests do not
        use prefixes cached under the old ones.
        """
        self._generations += 1
        held = self._versions.get(version)
        if lora is not None:
            self._put_adapter(version, held, tensors, lora)
            return
        self._check_shapes(tensors)
        if held is not None and held.adapter is not None:
            raise ConfigError.of(
                "version", version, "is an adapter; give full weights another name"
            )
        if held is None:
            held = self._versions[version] = Version(self._take_net(), None, self._generations)
        self._executor.write(held.net, tensors)
        held.generation = self._generations

    def begin(self) -> CausalLM:
        """Memory for full weights that no request sees, reserved until `finish` or `abandon`."""
        net = self._take_net()
        self._begun += 1
        return net

    def fill(self, net: CausalLM, tensors: Mapping[str, Tensor]) -> None:
        self._check_shapes(tensors)
        self._executor.write(net, tensors)

    def finish(self, version: str, net: CausalLM) -> None:
        """Make filled weights visible under a new name."""
        if version in self._versions:
            self.abandon(net)
            raise ConfigError.of("version", version, "is held already; give it another name")
        self._begun -= 1
        self._generations += 1
        self._versions[version] = Version(net, None, self._generations)

    def abandon(self, net: CausalLM) -> None:
        """Give back reserved memory that will not become a version."""
        self._begun -= 1
        self._spare.append(net)

    def drop(self, version: str) -> None:
        """Remove a version that no request uses; its memory is kept for the next one."""
        held = self.get(version)
        if version == self._config.base_version:
            raise RefusedError(f"version: {version!r} is the base that adapters stand on")
        if held.users:
            raise RefusedError(f"version: {version!r} is used by {held.users} requests; abort them")
        del self._versions[version]
        if held.adapter is None:
            self._spare.append(held.net)
        else:
            self._executor.drop_adapter(held.adapter)

    def _put_adapter(
        self, version: str, held: Version | None, tensors: Mapping[str, Tensor], lora: LoraSpec
    ) -> None:
        if held is not None and held.adapter is None:
            raise ConfigError.of("version", version, "is full weights; give adapters another name")
        adapters = sum(1 for other in self._versions.values() if other.adapter is not None)
        if held is None and adapters >= self._config.max_adapters:
            raise RefusedError(f"max_adapters: {adapters} are held; drop a version first")
        base = self._base
        copies = {
            name: tensor.to(device=base.device, dtype=base.dtype, copy=True)
            for name, tensor in tensors.items()
        }
        adapter = LoraAdapter(lora, base.config, copies, base.parallel)
        adapter.version = version
        if held is None:
            self._versions[version] = Version(base, adapter, self._generations)
            self._executor.prepare_adapter(base, adapter)
            return
        assert held.adapter is not None
        if held.adapter.spec.peft_config() != lora.peft_config():
            raise ConfigError.of("version", version, "has another rank, scale or layers")
        for name, tensor in held.adapter.tensors.items():
            tensor.copy_(adapter.tensors[name])
        self._executor.prepare_adapter(base, held.adapter)
        held.generation = self._generations

    def _check_shapes(self, tensors: Mapping[str, Tensor]) -> None:
        wanted = self._shapes
        given = {name for name in tensors if name != "lm_head.weight" or name in wanted}
        if given != wanted.keys():
            odd = sorted(given ^ wanted.keys())[:3]
            raise ConfigError.of("version tensors", odd, "are missing or not of this model")
        for name, shape in wanted.items():
            if tensors[name].shape != shape:
                raise ConfigError.of(name, tuple(tensors[name].shape), f"must be {tuple(shape)}")

    def _take_net(self) -> CausalLM:
        if self._spare:
            return self._spare.pop()
        full = sum(1 for version in self._versions.values() if version.adapter is None)
        full += self._begun
        if full >= self._config.max_full_versions:
            raise RefusedError(f"max_full_versions: {full} are held; drop a version first")
        net = empty_like(self._base)
        self._executor.prepare(net)
        return net
