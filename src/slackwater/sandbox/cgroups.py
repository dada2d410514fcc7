"""Fences made of control groups, version 1 or 2, whichever is writable."""

import contextlib
import os
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slackwater.model.errors import UnavailableError
from slackwater.sandbox import process_tree
from slackwater.sandbox.action_launcher import ActionLauncher
from slackwater.sandbox.fences import Fence, Fences, PinnedFences, Precedence
from slackwater.sandbox.launch import Launch, LaunchedProcess, can_create_namespaces
from slackwater.sandbox.limits import Limits

_ROOT = Path("/sys/fs/cgroup")
_REMOVE_WITHIN_S = 5.0
_LAUNCHER_PROCESSES = 1
_CONTROLLERS = ("cpuset", "memory", "pids")
_CORES, _PROCESSES, _IDLE = "cpuset.cpus", "pids.max", "cpu.idle"


@dataclass(frozen=True, slots=True)
class CgroupLayout:
    """The files of one version of control groups; `one_folder` for all controllers, or one each."""

    name: str
    memory: str
    memory_kills: str
    cpu_controller: str
    cpu_used: str
    cpu_unit_s: float
    weight: str
    weights: Mapping[Precedence, int]
    one_folder: bool


V1 = CgroupLayout(
    name="cgroup-v1",
    memory="memory.limit_in_bytes",
    memory_kills="memory.oom_control",
    cpu_controller="cpuacct",
    cpu_used="cpuacct.usage",
    cpu_unit_s=1e-9,
    weight="cpu.shares",
    weights={Precedence.EQUAL: 1024, Precedence.LOW: 110},
    one_folder=False,
)
V2 = CgroupLayout(
    name="cgroup-v2",
    memory="memory.max",
    memory_kills="memory.events",
    cpu_controller="cpuset",
    cpu_used="cpu.stat",
    cpu_unit_s=1e-6,
    weight="cpu.weight",
    weights={Precedence.EQUAL: 100, Precedence.LOW: 11},
    one_folder=True,
)


def _write(file: Path, value: object) -> None:
    """Write in one call, as the kernel requires."""
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def _read_fresh(file: str) -> bytes:
    """Hazard: a v1 procs file that was read before repeats stale content for a second."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)


class _CounterFile:
    """A kernel counter; its file stays open, since every action reads it."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> bytes:
        return os.pread(self._descriptor, 1 << 16, 0)

    def close(self) -> None:
        os.close(self._descriptor)


class CgroupFence:
    """One control group (v1: one per controller) with a launcher in it; one action at a time."""

    def __init__(
        self, layout: CgroupLayout, folders: Mapping[str, Path], *, own_network: bool
    ) -> None:
        self._layout = layout
        self._own_network = own_network
        self._folders = sorted(set(folders.values()))
        for folder in self._folders:
            folder.mkdir(exist_ok=True)
        if not layout.one_folder:
            _inherit_cpuset(folders["cpuset"])
            # Or each change of cores makes the kernel rebuild its scheduling domains.
            _write(folders["cpuset"] / "cpuset.sched_load_balance", 0)
        self._values: dict[Path, object] = {}
        self._cores = folders["cpuset"] / _CORES
        self._memory = folders["memory"] / layout.memory
        self._processes = folders["pids"] / _PROCESSES
        self._procs = [str(folder / "cgroup.procs") for folder in self._folders]
        self._cpu_used = (
            _CounterFile(folders[layout.cpu_controller] / layout.cpu_used)
            if layout.cpu_controller in folders
            else None
        )
        self._memory_kills = _CounterFile(folders["memory"] / layout.memory_kills)
        cpu = folders.get("cpu")
        self._cpu = cpu if cpu is not None and (cpu / _IDLE).exists() else None
        self._precedence = Precedence.EQUAL
        self._launcher: ActionLauncher | None = None

    def is_on(self, cores: frozenset[int]) -> bool:
        return self._values.get(self._cores) == _format_cores(cores)

    def _write_if_changed(self, file: Path, value: object) -> None:
        if self._values.get(file) != value:
            _write(file, value)
            self._values[file] = value

    def rlimits(self, limits: Limits) -> Mapping[int, int]:
        """As root, the kernel's count of processes per user limits them too."""
        return {resource.RLIMIT_NPROC: limits.processes} if os.getuid() == 0 else {}

    def start(self, launch: Launch, limits: Limits) -> LaunchedProcess:
        self._write_if_changed(self._cores, _format_cores(launch.cores))
        self._write_if_changed(self._memory, limits.memory_bytes)
        self._write_if_changed(self._processes, limits.processes + _LAUNCHER_PROCESSES)
        try:
            return self._ensure_launcher().start(launch)
        except UnavailableError:  # the launcher was killed
            self._drop_launcher()
            return self._ensure_launcher().start(launch)

    def set_precedence(self, precedence: Precedence) -> None:
        """Applies to the launcher too. The kernel forgets the weight of a group that was idle."""
        if self._cpu is None or precedence is self._precedence:
            return
        with contextlib.suppress(OSError):
            _write(self._cpu / _IDLE, int(precedence is Precedence.LAST))
            if precedence is not Precedence.LAST:
                _write(self._cpu / self._layout.weight, self._layout.weights[precedence])
            self._precedence = precedence

    def _ensure_launcher(self) -> ActionLauncher:
        if self._launcher is None:
            self._launcher = ActionLauncher(self._procs, own_network=self._own_network)
        return self._launcher

    def _drop_launcher(self) -> None:
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None

    def _pids(self) -> list[int]:
        pids: set[int] = set()
        for file in self._procs:
            with contextlib.suppress(OSError):
                pids.update(map(int, _read_fresh(file).split()))
        return sorted(pids - process_tree.helpers)

    def kill_all(self) -> None:
        """Kill all processes of the group but its launcher."""
        self.set_precedence(Precedence.EQUAL)  # or the launcher reports the end late
        if self._pids():
            self._write_if_changed(self._processes, 0)
            process_tree.kill_until_gone(self._pids)

    def cpu_s(self) -> float:
        if self._cpu_used is None:
            return 0.0
        with contextlib.suppress(OSError, ValueError):
            text = self._cpu_used.read()
            return float(text.removeprefix(b"usage_usec ").split()[0]) * self._layout.cpu_unit_s
        return 0.0

    def prepare(self) -> None:
        """Prepare for the next action; cores stay, since changes are slow and rarely needed."""
        if self._launcher is not None:
            try:
                self._launcher.prepare()
            except UnavailableError:
                self._drop_launcher()

    def memory_kills(self) -> int:
        with contextlib.suppress(OSError):
            for line in self._memory_kills.read().splitlines():
                name, _, count = line.partition(b" ")
                if name == b"oom_kill":
                    return int(count)
        return 0

    def remove(self) -> None:
        self._drop_launcher()
        self.kill_all()
        for counter in (self._cpu_used, self._memory_kills):
            if counter is not None:
                counter.close()
        for folder in self._folders:
            _remove(folder)


def _inherit_cpuset(group: Path) -> None:
    """Version 1 creates a group with empty sets, in which no process can run."""
    for name in ("cpuset.mems", _CORES):
        _write(group / name, (group.parent / name).read_text().strip())


def _read_pids(procs: Path) -> list[int]:
    return [int(pid) for pid in procs.read_text().split()]


def _format_cores(cores: frozenset[int]) -> str:
    return ",".join(str(core) for core in sorted(cores))


def _remove(folder: Path) -> None:
    """Remove a group, waiting for killed processes to disappear."""
    deadline_s = time.monotonic() + _REMOVE_WITHIN_S
    while folder.exists() and time.monotonic() < deadline_s:
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.002)


class CgroupFences:
    """All fences of one supervisor, in one group: a lane for each concurrent action."""

    enforces_cores = True

    def __init__(self, layout: CgroupLayout, folders: Mapping[str, Path]) -> None:
        self.name = layout.name
        self._layout = layout
        self._folders = folders
        self._own_networks = can_create_namespaces()
        self._lanes: list[CgroupFence] = []
        self._idle: list[CgroupFence] = []
        for folder in self._parents_of_lanes():
            folder.mkdir(exist_ok=True)
        self._kill_leftovers()
        if layout.one_folder:
            _delegate(folders["cpuset"], set(folders))
        else:
            _inherit_cpuset(folders["cpuset"])

    def _parents_of_lanes(self) -> set[Path]:
        names = self._folders if self._layout.one_folder else self._folders.keys() - {"cpu"}
        return {self._folders[name] for name in names}

    def _lane_folder(self, controller: str, name: str) -> Path:
        """A lane's group. Version 1's cpu groups are siblings of all other groups of the machine:
        precedence only applies among siblings.
        """
        folder = self._folders[controller]
        if folder in self._parents_of_lanes():
            return folder / name
        return folder.with_name(f"{folder.name}-{name}")

    def _kill_leftovers(self) -> None:
        """Kill processes of a killed supervisor of this name."""
        lanes = {self._lane_folder(controller, "lane-*") for controller in self._folders}
        for folder in {child for lane in lanes for child in lane.parent.glob(lane.name)}:
            process_tree.kill_until_gone(partial(_read_pids, folder / "cgroup.procs"))
            _remove(folder)

    def acquire(self, environment: str, user: int | None, cores: frozenset[int]) -> CgroupFence:
        for index, fence in enumerate(self._idle):
            if fence.is_on(cores):
                return self._idle.pop(index)
        if self._idle:
            return self._idle.pop()
        name = f"lane-{len(self._lanes)}"
        folders = {controller: self._lane_folder(controller, name) for controller in self._folders}
        fence = CgroupFence(self._layout, folders, own_network=self._own_networks)
        self._lanes.append(fence)
        return fence

    def release(self, fence: Fence) -> None:
        assert isinstance(fence, CgroupFence)
        fence.prepare()
        self._idle.append(fence)

    def close(self) -> None:
        for fence in self._lanes:
            fence.remove()
        for folder in self._parents_of_lanes():
            _remove(folder)


def _v1_folders(name: str) -> dict[str, Path]:
    cpu_controllers = [name for name in ("cpuacct", "cpu") if os.access(_ROOT / name, os.W_OK)]
    if len({(_ROOT / name).resolve() for name in cpu_controllers}) < len(cpu_controllers):
        cpu_controllers.remove("cpu")  # one hierarchy for both
    names = (*_CONTROLLERS, *cpu_controllers)
    return {controller: _ROOT / controller / f"slackwater-{name}" for controller in names}


def _v2_parents() -> list[Path]:
    """Candidate parents of our group: our own group, and the top."""
    with contextlib.suppress(OSError, StopIteration):
        own_group = next(
            line[3:] for line in Path("/proc/self/cgroup").read_text().split() if line[:3] == "0::"
        )
        return [_ROOT / own_group.lstrip("/"), _ROOT]
    return [_ROOT]


def _delegates_controllers(parent: Path) -> bool:
    """Whether the parent delegates its controllers, or can be configured to."""
    with contextlib.suppress(OSError):
        if not set(_CONTROLLERS) <= set((parent / "cgroup.controllers").read_text().split()):
            return False
        if not set(_CONTROLLERS) <= set((parent / "cgroup.subtree_control").read_text().split()):
            _delegate(parent, set(_CONTROLLERS))
        return True
    return False


def _delegate(group: Path, controllers: set[str]) -> None:
    _write(group / "cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(controllers)))


def _v2_folders(folder: Path) -> dict[str, Path]:
    """With the cpu controller, for precedence, where the parent delegates it too."""
    delegated = (folder.parent / "cgroup.subtree_control").read_text().split()
    return dict.fromkeys((*_CONTROLLERS, *({"cpu"} & set(delegated))), folder)


def choose_fences(name: str) -> tuple[Fences, str]:
    """The strongest fences that work here, and why stronger ones do not."""
    reasons: list[str] = []
    for parent in _v2_parents():
        if _delegates_controllers(parent):
            fences = _probe(V2, _v2_folders(parent / f"slackwater-{name}"), reasons)
            if fences is not None:
                return fences, "control groups, version 2"
    reasons.append("version 2 delegates no cpuset, memory and pids here")
    fences = _probe(V1, _v1_folders(name), reasons)
    if fences is not None:
        return fences, f"control groups, version 1 ({'; '.join(reasons)})"
    return PinnedFences(), f"core pinning and rlimits ({'; '.join(reasons)})"


def _probe(
    layout: CgroupLayout, folders: Mapping[str, Path], reasons: list[str]
) -> CgroupFences | None:
    """Fences that have run a probe; None, with a reason appended, if that fails."""
    try:
        fences = CgroupFences(layout, folders)
        cores = frozenset(os.sched_getaffinity(0))
        fence = fences.acquire("probe", None, cores)
        launch = Launch(argv=["/bin/true"], variables={}, folder="/", cores=cores)
        child = fence.start(launch, Limits())
        child.reap()
        child.close()
        fences.release(fence)
    except (OSError, UnavailableError) as error:
        reasons.append(f"{layout.name}: {error}")
        for folder in set(folders.values()):
            with contextlib.suppress(OSError):
                folder.rmdir()
        return None
    return fences
