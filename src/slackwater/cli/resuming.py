"""A run that is interrupted, or that fails, says how to go on with it."""

import contextlib
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slackwater.model.errors import DISK_FAULTS, ConfigError, SlackwaterError, UnavailableError


def command_of(command: str, argument: str, options: Mapping[str, Any]) -> str:
    """The command line with those options that are set; a list repeats its option."""
    words = [argument]
    for name, value in options.items():
        if value is True:
            words.append(name)
        elif isinstance(value, list):
            words += [word for item in value for word in (name, str(item))]
        elif value is not None and value is not False:
            words += [name, str(value)]
    return f"{command} {shlex.join(words)}"


@contextlib.contextmanager
def saying_how_to_resume(folder: Path, again: str) -> Iterator[None]:
    """Print the resume command when a run ends early; a full disk is one clear error."""
    threading.excepthook = _hook(threading.excepthook)
    try:
        yield
    except (KeyboardInterrupt, SystemExit, SlackwaterError) as ended:
        if not isinstance(ended, ConfigError):
            _say(folder, again)
        raise
    except OSError as error:
        if error.errno not in DISK_FAULTS:
            raise
        _say(folder, again)
        where = error.filename or folder
        fix = "make room and run the command again"
        raise UnavailableError(f"{where} cannot be written: {error.strerror}; {fix}") from None


def _say(folder: Path, again: str) -> None:
    if (folder / "recipe.json").is_file():
        begun = (folder / "checkpoint.json").is_file()
        how = "resume from the last checkpoint" if begun else "no checkpoint yet: start again"
        print(f"{how} with: {again}", file=sys.stderr, flush=True)


def _hook(usual: Any) -> Any:
    """The thread that writes curves meets a full disk too; the run itself says so."""

    def hook(caught: threading.ExceptHookArgs) -> None:
        error = caught.exc_value
        if not (isinstance(error, OSError) and error.errno in DISK_FAULTS):
            usual(caught)

    return hook
