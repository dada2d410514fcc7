"""Writes the pages of docs/reference that the code itself can tell: commands and configuration.

    python scripts/write_reference.py            # docs/reference/cli.md, service-configuration.md

`tests/unit/docs/test_reference_pages.py` fails when a page is not what this script writes.
"""

import dataclasses
import textwrap
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from slackwater.cli.main import app
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.model.config import default_of, plain
from slackwater.model.toml_text import toml_text
from slackwater.runtime.settings import ServiceSettings

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
WRITTEN = "<!-- Written by scripts/write_reference.py. Change the code or the script instead. -->"

# Options of `slackwater up` that have another name in a configuration file.
_OPTION_OF = {
    "models": "model",
    "tenants": "tenant",
    "allowed_hosts": "allowed_host",
    "database_url": "database",
    "session_silent_after_s": "session_timeout",
}

# What a key means where no option of the command line says it.
_MEANINGS: dict[str, str] = {
    "rewards": "Reward models that run as actions on devices of their own.",
    "limits": "Ceilings on what tenants may ask of the sandboxes.",
    "serving": "A model served with an SLO; see `--serve`, `--slo` and `--lend`.",
    "coschedule": "Lets submitted jobs share nodes phase by phase. Without it every job runs.",
    "residency": "Gives every node a state manager. Without it models stay on their device.",
    "rollout": "Rollout policies by name, and the limits of the rollout manager.",
    "operations": "Limits of training operations.",
    "worker_grace_s": "How long engines and trainers wait for a lost control plane; 0: not at all.",
    "max_live_turns": "Turns under way at once; tenants share them equally.",
    "max_body_bytes": "The largest request body.",
    "max_waiting_bytes": "Payload bytes of waiting training operations; tenants share them.",
    "hold_s": "How long a long poll waits before it answers `try_again`; at most 30.",
    "results_kept_s": "How long an unread result stays retrievable.",
    "ephemeral_bytes_per_model": "Unnamed sampler snapshots that are kept while they fit in this.",
    "ephemeral_versions_kept": "Unnamed sampler snapshots of one model that are kept always.",
    "instances.name": "Name of the instance.",
    "instances.kind": "`dedicated`, `spot` or `borrowed`.",
    "instances.model": "Base model; required where the service has several.",
    "instances.engine": "`embedded`, `vllm` or `sglang`.",
    "instances.url": "A vLLM or SGLang server to join; without it, one is started.",
    "instances.tp": "Devices of a node that it has: tensor parallel.",
    "rewards.services": "Reward models: `NAME = DIRECTORY`.",
    "rewards.devices": "Devices of one reward worker, 1 to 8.",
    "rewards.kv_mb": "KV cache of each device, in MiB.",
    "rewards.device_mib": "Memory of each device for models; 0 means most of it.",
    "limits.memory_mib": "Memory of one action or environment.",
    "limits.disk_mib": "Disk of one action or environment.",
    "limits.cores": "Cores of one action.",
    "limits.limit_s": "How long one action may run.",
    "limits.processes": "Processes of one action.",
    "limits.output_bytes": "Output of one action.",
    "limits.priority": "How far a tenant may raise or lower its own actions.",
    "limits.network": "Whether actions may ask for the network; default: the operator only.",
    "limits.waiting_actions": "Waiting actions of one tenant; default: an equal share.",
    "limits.environments": "Open environments of one tenant.",
    "limits.snapshots": "Snapshots of one tenant.",
    "limits.snapshot_mib": "Disk of all snapshots of one tenant.",
    "limits.memory_share": "Share of all nodes' memory that one tenant may hold at once; "
    "default: 0.5 with several tenants, else 1.",
    "limits.core_share": "Share of a node's cores that one tenant may hold at once; "
    "default: 0.9 with several tenants, else 1.",
    "limits.checkpoint_share": "Share of the disk with the service's state that checkpoints of one "
    "tenant may take; default: 0.5 with several tenants, else 1.",
    "limits.weight": "The tenant's part of the cores where several wait.",
    "limits.tenants": "`[limits.tenants.NAME]`: the same keys, for one tenant.",
    "fleet.pools": "Pools of nodes.",
    "fleet.pools.name": "Name of the pool.",
    "fleet.pools.engines": "Engines per node and model; unset: on all devices without a trainer.",
    "fleet.pools.local_engines": "Engines per node and model on the trainers' devices.",
    "fleet.pools.local_engine": "What those are: embedded, vllm or sglang.",
    "fleet.pools.trainers": "Trainers per node.",
    "fleet.pools.sandboxes": "Sandbox workers per node.",
    "fleet.pools.rewards": "Reward workers per node.",
    "fleet.pools.price_per_h": "Price of a node, in dollars per hour.",
    "fleet.pools.engine_layout": "Devices of each engine, such as `tp=2`; unset: one.",
    "fleet.pools.trainer_layout": "Devices of each trainer, such as `tp=2,dp=2`; unset: one.",
    "fleet.nodes": "Nodes that are known from the start.",
    "fleet.nodes.name": "Name of the node.",
    "fleet.nodes.pool": "Its pool.",
    "fleet.nodes.directory": "A folder for its files; without it, it shares the service's disk.",
    "fleet.nodes.site": "Nodes of one site share a fast network.",
    "fleet.nodes.cores": "Cores of this machine that belong to the node (local launcher).",
    "fleet.nodes.devices": "Equal slices of its cores, each a device (a CPU node).",
    "fleet.nodes.gpu_ids": 'Its GPUs, such as `["0", "1"]`; unset: all of the machine.',
    "fleet.launcher": "Who starts the node agents.",
    "fleet.listen": "Address that agents and workers dial; TLS unless it is the loopback.",
    "fleet.advertise": "Address that nodes are told, if it is not `listen`.",
    "fleet.ray": 'A Ray cluster, with `launcher = "ray"`.',
    "fleet.ray.address": "Address of the cluster.",
    "fleet.ray.namespace": "Ray namespace of the agents.",
    "fleet.ray.cores": "CPUs that an agent reserves.",
    "fleet.ray.gpus": "GPUs that an agent reserves; unset: all of its Ray node.",
    "fleet.ray.directory": "Folder for a node's files.",
    "fleet.ray.look_every_s": "How often to look for new and lost nodes.",
    "fleet.kubernetes": "Pools whose nodes are pods, with `slackwater launch kubernetes`.",
    "fleet.kubernetes.pool": "Name of the pool.",
    "fleet.kubernetes.image": "Image that has slackwater as its entry point.",
    "fleet.kubernetes.nodes": "Nodes, each a pod of one Indexed Job.",
    "fleet.kubernetes.gpus": "GPUs of each.",
    "fleet.kubernetes.cores": "Cores that each requests.",
    "fleet.kubernetes.memory_gb": "Memory of each, in GiB.",
    "fleet.kubernetes.notice_s": "Time from SIGTERM to the agent's end, in which turns move.",
    "fleet.kubernetes.site": "Nodes of one site share a fast network.",
    "fleet.kubernetes.namespace": "Namespace of its Job and Secret.",
    "fleet.kubernetes.queue": "Local queue of Kueue, which admits the Job; unset: none.",
    "fleet.providers": "Providers that rent nodes.",
    "fleet.providers.pool": "The pool of its nodes, which cost the pool's `price_per_h`.",
    "fleet.providers.rent": (
        "Command that starts a machine and prints its id in the last line. `{token_file}` holds "
        "the join token, `{node}` is the node's name."
    ),
    "fleet.providers.release": "Command that ends the machine `{id}`, also one that is gone.",
    "fleet.providers.budget": "The most that its nodes may cost in all.",
    "fleet.providers.nodes": "The most nodes at once.",
    "fleet.providers.idle_s": "Release nodes after so long without a job that can use them.",
    "fleet.slurm": "Pools whose nodes Slurm brings, with `slackwater launch slurm`.",
    "fleet.slurm.pool": "Name of the pool.",
    "fleet.slurm.nodes": "Nodes, each an element of one job array.",
    "fleet.slurm.gpus": "GPUs of each.",
    "fleet.slurm.cores": "Cores of each.",
    "fleet.slurm.partition": "Partition; unset: the cluster's default.",
    "fleet.slurm.time_limit": "As `sbatch --time`, such as `2-00:00:00`.",
    "fleet.slurm.notice_s": "Time from SIGTERM to the agent's end, in which turns move.",
    "fleet.slurm.site": "Nodes of one site share a fast network.",
    "fleet.slurm.directory": "Folder for a node's files, on the node.",
    "fleet.slurm.options": 'More options of sbatch, such as `["--account=rl"]`.',
    "fleet.slurm.setup": "Shell lines that run before the agent, such as `module load cuda`.",
    "fleet.slurm.program": "Command that runs slackwater on a node; unset: this installation.",
    "serving.model": "Name of the served model.",
    "serving.slo": "The SLO of the served model.",
    "serving.slo.ttft_s": "Time to the first token.",
    "serving.slo.tpot_s": "Mean time per later token.",
    "serving.slo.share": "Share of requests that must meet both.",
    "serving.lend": "Whether its devices roll out for jobs in between.",
    "serving.mode": "Admission policy of rollout steps; `foresight` was called `ours` before 0.2.",
    "coschedule.placement": "Placement policy: which jobs share which nodes.",
    "coschedule.ordering": "Whose phase runs next; `auto` follows the placement policy.",
    "coschedule.backfill": "Whether a job may pass an earlier one that fits nowhere yet.",
    "coschedule.guard": "Whether a job gets nodes of its own before its SLO could break.",
    "coschedule.tails": "Whether the last turns of a rollout move to a few engines.",
    "coschedule.host_memory_gb": "Host memory of a node for all jobs' states.",
    "coschedule.options": "Options of the placement policy, such as `max_group_size`.",
    "coschedule.limits": "Time limits of phases.",
    "coschedule.limits.lease_s": "Permit heartbeat timeout of code that asks for permits itself.",
    "coschedule.limits.factor": "A phase may take this many times its profile, ...",
    "coschedule.limits.least_s": "... and at least this long.",
    "coschedule.limits.share_after": "After this many times its profile, a phase lets others in.",
    "coschedule.limits.unknown_s": "Limit of a phase without a profile.",
    "coschedule.limits.rest_s": "A job that asks for nothing this long blocks no phase.",
    "coschedule.limits.yield_s": "A job that asks for nothing this long blocks no placement.",
    "coschedule.limits.gone_s": "A job without driver and session stops after this silence.",
    "coschedule.limits.strikes": "A job fails after this many lost permits.",
    "coschedule.limits.cycles": "Iterations for which an unprofiled job is measured.",
    "coschedule.limits.kept_share": "Share of the engines that a rollout's tail keeps.",
    "coschedule.switching": "Expected cost of switching jobs on a node.",
    "coschedule.switching.warm_base_s": "From host memory, fixed part.",
    "coschedule.switching.warm_s_per_billion": "From host memory, per billion parameters.",
    "coschedule.switching.cold_base_s": "From disk, fixed part.",
    "coschedule.switching.cold_s_per_billion": "From disk, per billion parameters.",
    "coschedule.move": "Expected cost of moving a job to other nodes.",
    "coschedule.move.base_s": "Fixed part.",
    "coschedule.move.s_per_billion": "Per billion parameters.",
    "residency.device_mb": "Memory of each device for managed states, in MiB.",
    "residency.host_mb": "Host memory for managed states; default: half of the node's.",
    "residency.disk_mb": "Disk for spilled states; 0: none.",
    "prices": "Prices per hour, for cost and savings on the dashboard.",
    "prices.device_per_h": "A dedicated device, in dollars; 0: not known.",
    "prices.spot_device_per_h": "A spot device.",
    "prices.core_per_h": "A core of a sandbox node.",
    "operations.give_up_gap_after_s": "A sequence number that never comes is skipped after this.",
    "operations.give_up_move_after_s": "A move of state that nobody reports is given up.",
    "operations.save_log_after_s": "Trainer work between two snapshots.",
    "operations.snapshot_share": "Share of trainer time that snapshots may take.",
    "operations.max_attempts": "An operation that kills its trainer this often fails.",
    "operations.max_waiting_per_model": "Waiting operations of one model.",
    "operations.max_skipped": "How far a sequence number may lie ahead.",
    "rollout.routing": "`keep_warm` (default), `affinity`, `turn_wise`, `shortest_queue`, "
    "`pinned`, `round_robin`.",
    "rollout.balancing": "`even_steps` (default), `fill_idle`, `none`.",
    "rollout.seeding": "`balanced_finish` (default), `adaptive_window`, `colocated`.",
    "rollout.lease_s": "An instance that is silent this long is gone; the service's default is 20.",
    "rollout.stall_s": "Turns leave an instance that makes no token for this long.",
    "rollout.borrowed_stall_s": "The same, on a borrowed instance.",
    "rollout.turn_timeout_s": "Deadline of a turn that brings none.",
    "rollout.watch_every_s": "How often deadlines and leases are checked.",
    "rollout.balance_every_s": "How often load is balanced.",
    "rollout.max_losses_without_progress": "A turn fails when this many instances vanish under it "
    "in a row without a new token.",
    "rollout.faults_allowed": "An instance with more faults is released.",
    "rollout.home_lease_s": "The longest pause after which a trajectory counts as ended.",
    "rollout.trainer_patience_s": "How long local engines may keep devices from a trainer.",
    "rollout.move_rest_s": "Least time between two balancing moves of one turn.",
    "rollout.remembered_trajectories": "Trajectories whose last instance is remembered.",
    "rollout.kept_for_others": "Share of every instance that one tenant leaves to others.",
}


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def cli_page() -> str:
    """Every command with its arguments and options."""
    root: Any = typer.main.get_command(app)
    context = root.make_context("slackwater", [], resilient_parsing=True)
    lines = [
        "# Command line",
        "",
        WRITTEN,
        "",
        "Every command prints its options with `--help`; `slackwater --install-completion` lets "
        "the",
        "shell complete them. The exit status is 0 for success, 1 for a failure, 2 for wrong "
        "input and",
        "130 for Ctrl-C.",
        "",
    ]
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        lines += _section(command, f"slackwater {name}", context)
    return "\n".join(lines).rstrip() + "\n"


def _section(command: Any, path: str, parent: Any) -> Iterator[str]:
    context = command.make_context(path.split()[-1], [], parent=parent, resilient_parsing=True)
    if hasattr(command, "list_commands"):
        for name in command.list_commands(context):
            yield from _section(command.get_command(context, name), f"{path} {name}", context)
        return
    yield from (f"## {path}", "", *textwrap.wrap(" ".join((command.help or "").split()), 100), "")
    shown = [param for param in command.params if not getattr(param, "hidden", False)]
    if shown:
        yield from ("| argument or option | default | meaning |", "|---|---|---|")
        yield from (_parameter(param) for param in shown)
        yield ""


def _parameter(param: Any) -> str:
    if param.param_type_name == "argument":
        name = f"`{param.name.upper()}`" + (" ..." if param.nargs == -1 else "")
    else:
        name = ", ".join(f"`{option}`" for option in param.opts)
        name += " (repeatable)" if param.multiple else ""
    default = "" if callable(param.default) else param.default
    if getattr(param, "is_flag", False) or default in (None, ()):
        default = ""
    if isinstance(default, Enum):
        default = default.value
    shown = f"`{default}`" if default != "" else "required" if param.required else ""
    return f"| {name} | {_cell(shown)} | {_cell(getattr(param, 'help', None) or '')} |"


def configuration_page() -> str:
    """Every key of `slackwater up --config FILE`, table by table."""
    lines = [
        "# Service configuration",
        "",
        WRITTEN,
        "",
        "`slackwater up --config FILE` reads one TOML file. An option on the command line wins "
        "over",
        "the file, and `--set a.b=value` wins over both. Unknown keys are refused. `slackwater up",
        "--dry-run` prints the resolved configuration; the service keeps it as `config.toml` in "
        "its",
        "state directory.",
        "",
        "`slackwater up --fleet FILE` reads the `[fleet]` table from a file of its own, and",
        "`slackwater up --instances FILE` the `[[instances]]` list.",
        "",
    ]
    lines += _table("", ServiceSettings)
    lines += _table("rollout", RolloutSettings)
    return "\n".join(lines).rstrip() + "\n"


def _table(at: str, cls: Any, defaults: Any = None, listed: bool = False) -> Iterator[str]:
    """The keys of a class. `defaults` is the instance whose values a file changes, if any."""
    hints = get_type_hints(cls)
    inner: list[tuple[str, Any, Any, bool]] = []
    heading = f"`[[{at}]]`" if listed else f"`[{at}]`"
    yield from (f"## {heading}" if at else "## Top level", "")
    yield from ("| key | type | default | meaning |", "|---|---|---|---|")
    for field in dataclasses.fields(cls):
        path = f"{at}.{field.name}" if at else field.name
        hint = hints[field.name]
        default = default_of(field) if defaults is None else getattr(defaults, field.name)
        found = next(_dataclasses_in(hint), None)
        kind = _kind(hint)
        if found is not None:
            several = get_origin(hint) is tuple
            inner.append((path, found, default if isinstance(default, found) else None, several))
            kind = "list of tables" if several else "table"
        yield f"| `{path}` | {kind} | {_default(default)} | {_cell(_meaning(path))} |"
    yield ""
    for table in inner:
        yield from _table(*table)


def _meaning(path: str) -> str:
    if path in _MEANINGS:
        return _MEANINGS[path]
    root: Any = typer.main.get_command(app)
    context = root.make_context("slackwater", [], resilient_parsing=True)
    options = {param.name: param for param in root.get_command(context, "up").params}
    option = options.get(_OPTION_OF.get(path, path))
    if option is None or not option.help:
        raise KeyError(f"{path}: say what it means, in _MEANINGS of {__file__}")
    return f"{option.help} (`{option.opts[0]}`)"


def _dataclasses_in(hint: Any) -> Iterator[Any]:
    if dataclasses.is_dataclass(hint):
        yield hint
    elif get_origin(hint) in (Union, types.UnionType, tuple):
        for arm in get_args(hint):
            yield from _dataclasses_in(arm)


def _kind(hint: Any) -> str:
    origin, names = get_origin(hint), {bool: "true/false", int: "integer", float: "number"}
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(arm) for arm in get_args(hint) if arm is not type(None))
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if origin is tuple:
        return f"list of {_kind(get_args(hint)[0])}"
    if origin is not None:
        return "table"
    if isinstance(hint, type) and issubclass(hint, PurePath):
        return "path"
    return names.get(hint, "text" if hint is str or _is_choice(hint) else "policy")


def _is_choice(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _default(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "required"
    value = plain(default)
    if not isinstance(value, (bool, int, float, str, list)) or value in ([], ""):
        return ""
    return f"`{toml_text({'x': value}).strip().removeprefix('x = ')}`"


PAGES = {"cli.md": cli_page, "service-configuration.md": configuration_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")
