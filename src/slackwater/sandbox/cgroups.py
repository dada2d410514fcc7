"""Fences made of control groups, version 1 or 2, whichever this process may write to."""

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
from slackwater.sandbox.launch import Launch, LaunchedProcess, can_have_namespaces
from slackwater.sandbox.limits import Limits

ROOT = Path("/sys/fs/cgroup")
_REMOVE_WITHIN_S = 5.0
_OWN_PROCESSES = 1  # the keeper
_CONTROLLERS = ("cpuset", "memory", "pids")
_IDLE = "cpu.idle"


@dataclass(frozen=True, slots=True)
class CgroupLayout:
    """Where one version of control groups keeps its files; a folder per controller, or one."""

    name: str
    cores: str
    memory: str
    processes: str
    memory_kills: str
    cpu_controller: str
    cpu_used: str
    cpu_unit_s: float
    weight: str
    weights: Mapping[Precedence, int]
    one_folder: bool


V1 = CgroupLayout(
    name="cgroup-v1",
    cores="cpuset.cpus",
    memory="memory.limit_in_bytes",
    processes="pids.max",
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
    cores="cpuset.cpus",
    memory="memory.max",
    processes="pids.max",
    memory_kills="memory.events",
    cpu_controller="cpuset",
    cpu_used="cpu.stat",
    cpu_unit_s=1e-6,
    weight="cpu.weight",
    weights={Precedence.EQUAL: 100, Precedence.LOW: 11},
    one_folder=True,
)


def _write(file: Path, value: object) -> None:
    """One write call, as the kernel wants it."""
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def _read_anew(file: str) -> bytes:
    """Hazard: a v1 procs file that was read before repeats stale content for a second."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)


class _Dial:
    """A kernel counter that is read for every action, so its file stays open."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> bytes:
        return os.pread(self._descriptor, 1 << 16, 0)

    def close(self) -> None:
        os.close(self._descriptor)


class CgroupFence:
    """One control group (v1: one per controller) with a launcher in it; one action at a time."""

    def __init__(
        self, knobs: CgroupLayout, folders: Mapping[str, Path], *, own_network: bool
    ) -> None:
        self._knobs = knobs
        self._own_network = own_network
        self._folders = sorted(set(folders.values()))
        for folder in self._folders:
            folder.mkdir(exist_ok=True)
        if not knobs.one_folder:
            cpuset = folders["cpuset"]
            for name in ("cpuset.mems", "cpuset.cpus"):
                _write(cpuset / name, (cpuset.parent / name).read_text().strip())
            # Or a change of cores makes the kernel lay out its scheduling domains anew.
            _write(cpuset / "cpuset.sched_load_balance", 0)
        self._turned: dict[Path, object] = {}
        self._cores = folders["cpuset"] / knobs.cores
        self._memory = folders["memory"] / knobs.memory
        self._processes = folders["pids"] / knobs.processes
        self._procs = [str(folder / "cgroup.procs") for folder in self._folders]
        self._cpu_used = (
            _Dial(folders[knobs.cpu_controller] / knobs.cpu_used)
            if knobs.cpu_controller in folders
            else None
        )
        self._memory_kills = _Dial(folders["memory"] / knobs.memory_kills)
        cpu = folders.get("cpu")
        self._cpu = cpu if cpu is not None and (cpu / _IDLE).exists() else None
        self._precedence = Precedence.EQUAL
        self._keeper: ActionLauncher | None = None

    def own(self) -> set[int]:
        """Processes inside that belong to no action."""
        return set() if self._keeper is None else {self._keeper.pid}

    def is_on(self, cores: frozenset[int]) -> bool:
        return self._turned.get(self._cores) == _written(cores)

    def _turn(self, file: Path, value: object) -> None:
        if self._turned.get(file) != value:
            _write(file, value)
            self._turned[file] = value

    def rlimits(self, limits: Limits) -> Mapping[int, int]:
        """The kernel also counts processes per user."""
        return {resource.RLIMIT_NPROC: limits.processes} if os.getuid() == 0 else {}

    def start(self, launch: Launch, limits: Limits) -> LaunchedProcess:
        self._turn(self._cores, _written(launch.cores))
        self._turn(self._memory, limits.memory_bytes)
        self._turn(self._processes, limits.processes + _OWN_PROCESSES)
        try:
            return self._kept().start(launch)
        except UnavailableError:  # somebody killed the keeper
            self._drop_keeper()
            return self._kept().start(launch)

    def set_precedence(self, precedence: Precedence) -> None:
        """The launcher's too. The kernel forgets the weight of a group that was idle."""
        if self._cpu is None or precedence is self._precedence:
            return
        with contextlib.suppress(OSError):
            _write(self._cpu / _IDLE, int(precedence is Precedence.LAST))
            if precedence is not Precedence.LAST:
                _write(self._cpu / self._knobs.weight, self._knobs.weights[precedence])
            self._precedence = precedence

    def _kept(self) -> ActionLauncher:
        if self._keeper is None:
            self._keeper = ActionLauncher(self._procs, own_network=self._own_network)
        return self._keeper

    def _drop_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    def _inside(self) -> list[int]:
        found: set[int] = set()
        for file in self._procs:
            with contextlib.suppress(OSError):
                found.update(map(int, _read_anew(file).split()))
        return sorted(found - self.own())

    def kill_all(self) -> None:
        """All of the group but its keeper."""
        self.set_precedence(Precedence.EQUAL)  # or the end, and the launcher's report, come late
        if self._inside():
            self._turn(self._processes, 0)
            process_tree.end_all(self._inside)

    def cpu_s(self) -> float:
        if self._cpu_used is None:
            return 0.0
        with contextlib.suppress(OSError, ValueError):
            text = self._cpu_used.read()
            return float(text.removeprefix(b"usage_usec ").split()[0]) * self._knobs.cpu_unit_s
        return 0.0

    def prepare(self) -> None:
        """Prepare the next process; cores stay, since changing them is slow and rarely needed."""
        if self._keeper is not None:
            try:
                self._keeper.prepare()
            except UnavailableError:
                self._drop_keeper()

    def memory_kills(self) -> int:
        with contextlib.suppress(OSError):
            for line in self._memory_kills.read().splitlines():
                name, _, count = line.partition(b" ")
                if name == b"oom_kill":
                    return int(count)
        return 0

    def remove(self) -> None:
        self._drop_keeper()
        self.kill_all()
        for dial in (self._cpu_used, self._memory_kills):
            if dial is not None:
                dial.close()
        for folder in self._folders:
            _remove(folder)


def _listed(procs: Path) -> list[int]:
    return [int(pid) for pid in procs.read_text().split()]


def _written(cores: frozenset[int]) -> str:
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
    """All fences of one supervisor in one group; as many as concurrent actions."""

    pins_for_good = True

    def __init__(self, knobs: CgroupLayout, folders: Mapping[str, Path]) -> None:
        self.name = knobs.name
        self._knobs = knobs
        self._at = folders
        self._own_networks = can_have_namespaces()
        self._made: list[CgroupFence] = []
        self._free: list[CgroupFence] = []
        for folder in self._own_folders():
            folder.mkdir(exist_ok=True)
        self._sweep()
        if knobs.one_folder:
            _hand_down(folders["cpuset"], set(folders))
        else:
            cpuset = folders["cpuset"]
            for name in ("cpuset.mems", "cpuset.cpus"):
                _write(cpuset / name, (cpuset.parent / name).read_text().strip())

    def _own_folders(self) -> set[Path]:
        return {self._at[name] for name in self._at if name != "cpu" or self._knobs.one_folder}

    def _lane(self, controller: str, name: str) -> Path:
        """Of version 1, next to all other groups: only among those is it told who comes last."""
        at = self._at[controller]
        return at / name if at in self._own_folders() else at.with_name(f"{at.name}-{name}")

    def _sweep(self) -> None:
        """Kill what a killed supervisor of this name left."""
        lanes = {self._lane(controller, "lane-*") for controller in self._at}
        for folder in {child for lane in lanes for child in lane.parent.glob(lane.name)}:
            process_tree.end_all(partial(_listed, folder / "cgroup.procs"))
            _remove(folder)

    def take(self, environment: str, user: int | None, cores: frozenset[int]) -> CgroupFence:
        for place, fence in enumerate(self._free):
            if fence.is_on(cores):
                return self._free.pop(place)
        if self._free:
            return self._free.pop()
        name = f"lane-{len(self._made)}"
        folders = {controller: self._lane(controller, name) for controller in self._at}
        fence = CgroupFence(self._knobs, folders, own_network=self._own_networks)
        self._made.append(fence)
        return fence

    def give_back(self, fence: Fence) -> None:
        assert isinstance(fence, CgroupFence)
        fence.prepare()
        self._free.append(fence)

    def others(self) -> set[int]:
        return set().union(*(fence.own() for fence in self._made))

    def close(self) -> None:
        for fence in self._made:
            fence.remove()
        for folder in self._own_folders():
            _remove(folder)


def _v1_folders(root: Path, name: str) -> dict[str, Path]:
    more = [name for name in ("cpuacct", "cpu") if os.access(root / name, os.W_OK)]
    if len({(root / name).resolve() for name in more}) < len(more):
        more.remove("cpu")  # one hierarchy for both
    names = (*_CONTROLLERS, *more)
    return {controller: root / controller / f"slackwater-{name}" for controller in names}


def _v2_parents(root: Path) -> list[Path]:
    """Candidate parents of our group: our own group, and the top."""
    with contextlib.suppress(OSError, StopIteration):
        own = next(
            line[3:] for line in Path("/proc/self/cgroup").read_text().split() if line[:3] == "0::"
        )
        return [root / own.lstrip("/"), root]
    return [root]


def _v2_ready(parent: Path) -> bool:
    """Whether the parent hands its controllers down, or can be made to."""
    with contextlib.suppress(OSError):
        if not set(_CONTROLLERS) <= set((parent / "cgroup.controllers").read_text().split()):
            return False
        if not set(_CONTROLLERS) <= set((parent / "cgroup.subtree_control").read_text().split()):
            _hand_down(parent, set(_CONTROLLERS))
        return True
    return False


def _hand_down(group: Path, controllers: set[str]) -> None:
    _write(group / "cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(controllers)))


def _v2_folders(folder: Path) -> dict[str, Path]:
    """With precedence where the parent hands that down, too."""
    handed = (folder.parent / "cgroup.subtree_control").read_text().split()
    return dict.fromkeys((*_CONTROLLERS, *({"cpu"} & set(handed))), folder)


def choose_fences(name: str, root: Path = ROOT) -> tuple[Fences, str]:
    """The strongest fences that work here, and why stronger ones do not."""
    why: list[str] = []
    for parent in _v2_parents(root):
        if _v2_ready(parent):
            found = _tried(V2, _v2_folders(parent / f"slackwater-{name}"), why)
            if found is not None:
                return found, "control groups, version 2"
    why.append("version 2 hands down no cpuset, memory and pids here")
    found = _tried(V1, _v1_folders(root, name), why)
    if found is not None:
        return found, f"control groups, version 1 ({'; '.join(why)})"
    return PinnedFences(), f"core pinning and rlimits ({'; '.join(why)})"


def _tried(knobs: CgroupLayout, folders: Mapping[str, Path], why: list[str]) -> CgroupFences | None:
    """Try it by making a fence and removing it."""
    try:
        fences = CgroupFences(knobs, folders)
        cores = frozenset(os.sched_getaffinity(0))
        fence = fences.take("probe", None, cores)
        launch = Launch(argv=["/bin/true"], variables={}, folder="/", cores=cores)
        child = fence.start(launch, Limits())
        child.reap()
        child.close()
        fences.give_back(fence)
    except (OSError, UnavailableError) as error:
        why.append(f"{knobs.name}: {error}")
        for folder in set(folders.values()):
            with contextlib.suppress(OSError):
                folder.rmdir()
        return None
    return fences
