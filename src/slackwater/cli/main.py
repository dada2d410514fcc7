"""`slackwater`: the commands; each is imported only when it is called."""

import importlib
import signal
import sys
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from slackwater.cli.checkout import load_benchmarks
from slackwater.model.errors import DISK_FAULTS, SlackwaterError

# The root of typer's usage errors, which it does not export.
_UsageError: type[Any] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)

# name -> (module with a typer `app`, one line of help). Modules of `benchmarks` need a checkout.
COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("slackwater.cli.up", "Start the service: models behind the Tinker and OpenAI APIs."),
    "down": ("slackwater.cli.down", "Stop the service."),
    "status": ("slackwater.cli.status", "Show what the service is doing."),
    "agent": ("slackwater.cli.agent", "Join this machine to a fleet."),
    "node": ("slackwater.cli.node", "Machines of a fleet: list, token, revoke."),
    "launch": ("slackwater.cli.launch", "Start a fleet's nodes on Slurm or Kubernetes."),
    "job": ("slackwater.cli.job", "Jobs: submit, list, show, logs, stop, resume."),
    "demo": ("slackwater.cli.demo", "Run a folder of jobs alone and together, and compare."),
    "top": ("slackwater.cli.top", "Watch jobs share the fleet: permits, utilization, slowdowns."),
    "dashboard": ("slackwater.cli.dashboard", "Show the service or a recorded run in a browser."),
    "instance": ("slackwater.cli.instance", "Engines: list, add, drain, kill, replay a trace."),
    "action": ("slackwater.cli.action", "Commands in sandboxes: run, top, mcp."),
    "bench": ("benchmarks.cli.bench", "Run benchmarks (needs a checkout)."),
    "plan": ("slackwater.cli.plan", "Plan how jobs share a fleet, and what that saves."),
    "sim": ("slackwater.cli.sim", "Simulate a fleet: run, compare, replay, list."),
    "rollout": (
        "benchmarks.cli.rollout",
        "Simulate a rollout scenario under each policy (needs a checkout).",
    ),
    "storm": (
        "benchmarks.cli.storm",
        "Inject random faults into the controllers (needs a checkout).",
    ),
    "model": ("slackwater.cli.model", "Models: get, make, list, export, untie."),
    "train": ("slackwater.cli.train", "Train with GRPO, supervised fine-tuning or DPO."),
    "eval": ("slackwater.cli.eval", "Evaluate a served model with lm-eval or inspect-ai."),
}


class LateCommands(TyperGroup):
    """A group that imports its commands on use, so that `--help` is instant."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if COMMANDS[cmd_name][0].startswith("benchmarks"):
            load_benchmarks()
        module = importlib.import_module(COMMANDS[cmd_name][0])
        module.app.rich_markup_mode = None  # the same style of help for every command
        return typer.main.get_command(module.app)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


app = typer.Typer(
    cls=LateCommands,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # late: a quarter of a short command

        print(f"slackwater {version('slackwater')}")
        raise typer.Exit


@app.callback()
def root(
    shown: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """RL post-training of language models on the slack of a GPU fleet."""


def main() -> None:
    """Exit 0 if it worked, 1 if it failed, 2 if the input was wrong, 130 on Ctrl-C."""
    interrupt = _Interrupt()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # no shell ignores it
        signal.signal(signal.SIGINT, interrupt)
    try:
        status = typer.main.get_command(app).main(prog_name="slackwater", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # `_report` raises it again
        was_interrupted = interrupt.received or isinstance(error, typer.Abort)
        sys.exit(130 if was_interrupted else _report(error))
    sys.exit(status if isinstance(status, int) else 0)


class _Interrupt:
    """Handles SIGINT, and remembers it: some imports turn KeyboardInterrupt into other errors."""

    received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.default_int_handler(number, frame)


def _report(error: BaseException) -> int:
    """Print one line about the error of a command, if it is a user's; returns the exit status."""
    match error:
        case typer.Exit():
            return error.exit_code
        case _UsageError():
            _show_usage(error)
            return 2
        case SlackwaterError():
            message, status = str(error), 2 if isinstance(error, ValueError) else 1
        case ModuleNotFoundError() if not str(error.name).startswith("slackwater"):
            message = (
                f"{error.name} is not installed, but this command needs it: "
                "pip install -c constraints.txt '.[serve,rl]'"
            )
            status = 1
        case OSError() if error.errno in DISK_FAULTS or error.filename is not None:
            message, status = str(error), 1  # about a file that the user named
        case _:
            raise error
    print(f"slackwater: {message}", file=sys.stderr)
    return status


def _show_usage(error: Any) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    command = error.ctx.command_path if error.ctx else "slackwater"
    message = error.format_message().rstrip(".")
    print(f"slackwater: {message}; see `{command} --help`", file=sys.stderr)
