"""`slackwater`: the commands, each imported only when it is called."""

import errno
import importlib
import sys
from typing import Any

import click
import typer

from slackwater.model.errors import SlackwaterError

_FAULTS_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)

# name -> (module with a typer `app`, one line of help). Add a command by adding a line.
COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("slackwater.cli.up", "Start the service: models behind the Tinker and OpenAI APIs."),
    "down": ("slackwater.cli.down", "Stop the service."),
    "status": ("slackwater.cli.status", "Say what the service is doing."),
    "instance": ("slackwater.cli.instance", "Engines: list, add, drain, kill, replay a trace."),
    "bench": ("slackwater.cli.bench", "Measure, and print one JSON object."),
    "plan": ("slackwater.cli.plan", "Say how jobs should share a fleet, and what that saves."),
    "sim": ("slackwater.cli.sim", "Run a fleet in virtual time: run, compare, replay, list."),
    "rollout": ("slackwater.cli.rollout", "Run a rollout scenario in virtual time, rule by rule."),
    "storm": ("slackwater.cli.storm", "Random faults over the rollout manager, from a seed."),
    "model": ("slackwater.cli.model", "Get or make models."),
    "train": ("slackwater.cli.train", "Train by reinforcement learning."),
}


class LateCommands(click.Group):
    """A group whose members are imported when named: `--help` stays instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        return typer.main.get_command(module.app)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LateCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="slackwater")
def root() -> None:
    """RL post-training of language models on the slack of a GPU fleet."""


# Newer typer carries a click of its own, whose errors are not the installed click's.
_USAGE_ERRORS: tuple[type[Exception], ...] = (
    click.ClickException,
    *(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"),
)


def main() -> None:
    """Exit 0 if it worked, 1 if it failed, 2 if the input was wrong, 130 on Ctrl-C."""
    try:
        status = root.main(standalone_mode=False)
    except (click.exceptions.Exit, typer.Exit) as ended:
        sys.exit(ended.exit_code)
    except _USAGE_ERRORS as error:
        _show_usage(error)
        sys.exit(2)
    except (click.Abort, typer.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except SlackwaterError as error:
        print(f"slackwater: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except OSError as error:
        if error.errno not in _FAULTS_OF_THE_DISK:
            raise
        print(f"slackwater: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)


def _show_usage(error: Any) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        print(f"slackwater: {error.format_message()} (see --help)", file=sys.stderr)
