"""The cores of one node: whole, exclusive, and of one NUMA node if possible (ARL-Tangram 5.2)."""

from collections.abc import Sequence


class NodeCores:
    """Which cores are free, by NUMA node."""

    def __init__(self, numa_nodes: Sequence[Sequence[int]]) -> None:
        self.total = sum(len(cores) for cores in numa_nodes)
        self.free = self.total
        self._home = {core: i for i, cores in enumerate(numa_nodes) for core in cores}
        self._free: list[list[int]] = [sorted(cores, reverse=True) for cores in numa_nodes]

    def take(self, count: int) -> tuple[int, ...]:
        """This many: from the fullest NUMA node that has them all, else from as few as possible."""
        assert count <= self.free, f"{count} cores wanted, {self.free} free"
        self.free -= count
        enough = [cores for cores in self._free if len(cores) >= count]
        if enough:
            return self._pop(min(enough, key=len), count)
        taken: tuple[int, ...] = ()
        for cores in sorted(self._free, key=len, reverse=True):
            taken += self._pop(cores, min(count - len(taken), len(cores)))
        return taken

    @staticmethod
    def _pop(cores: list[int], count: int) -> tuple[int, ...]:
        taken = tuple(cores[len(cores) - count :][::-1])
        del cores[len(cores) - count :]
        return taken

    def give_back(self, cores: Sequence[int]) -> None:
        """They are idle again."""
        self.free += len(cores)
        for core in cores:
            self._free[self._home[core]].append(core)

    def idle(self) -> list[int]:
        """The free cores, for checks."""
        return [core for cores in self._free for core in cores]
