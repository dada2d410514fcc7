"""Start and end of every worker process: options, keys, signals, exit status."""

import argparse
import atexit
import contextlib
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from slackwater.model.errors import ConfigError, SlackwaterError
from slackwater.sandbox.linux import die_with_parent
from slackwater.wire import messages
from slackwater.wire.agent import GRACE, NOTICED, PARENT, PIN, SECRET
from slackwater.worker.connection import EXIT_ORPHANED, Connection, DisconnectedError

NODE_SECRET_VARIABLE = "SLACKWATER_NODE_SECRET"  # shared by the processes of one node


def base_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="the control plane")
    parser.add_argument("--worker", required=True, help="this worker's name")
    parser.add_argument("--files", required=True, help="folder:DIRECTORY, or URL=CACHE of a depot")
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--node", default="", help="the node that the worker runs on")
    parser.add_argument("--relay", default="", metavar="HOST:PORT", help="its weight relay")
    return parser


def engine_parser(description: str) -> argparse.ArgumentParser:
    """The parser of a worker that samples from a model."""
    parser = base_parser(description)
    parser.add_argument("--model", required=True, help="URI of the base model")
    parser.add_argument("--base", required=True, help="name of the base model")
    parser.add_argument("--base-version", required=True, help="weight version of the base itself")
    parser.add_argument("--max-running", type=int, default=64)
    return parser


def address_of(connect: str) -> tuple[str, int]:
    host, _, port = connect.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError.of("--connect", connect, "must be HOST:PORT")
    return host.strip("[]"), int(port)


def secret() -> str:
    """This process's key, which it proves to the control plane."""
    return _pop_variable(SECRET)


def node_secret() -> str:
    """The key by which the processes of one node authenticate each other."""
    return _pop_variable(NODE_SECRET_VARIABLE)


@functools.cache
def _pop_variable(variable: str) -> str:
    """Remove a secret from the environment, so that child processes do not inherit it."""
    value = os.environ.pop(variable, "")
    if not value:
        raise ConfigError.of(variable, value, "must be set; `slackwater up` sets it")
    return value


def pin() -> str | None:
    """The hash of the control plane's certificate, if connections are encrypted."""
    return os.environ.get(PIN) or None


def dial(connect: str, hello: messages.Hello) -> Connection:
    """The connection of a worker that an agent started."""
    grace_s = float(os.environ.pop(GRACE, "0"))  # child processes must not inherit it
    return Connection(address_of(connect), hello, secret(), pin=pin(), grace_s=grace_s)


def leave_signal() -> signal.Signals:
    """The signal that asks a worker of this node to leave."""
    return signal.SIGUSR1 if os.environ.get(NOTICED) else signal.SIGTERM


def run_worker(main: Callable[[], None], *, cleans_up: bool = False, by_hand: bool = False) -> None:
    """Run a worker's main: exit 0 when stopped, 3 when the control plane is lost.

    When its parent dies, a worker that `cleans_up` is asked to leave; others get SIGKILL. One
    started `by_hand` outlives its parent and stops on Ctrl-C.
    """
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    for variable in (SECRET, NODE_SECRET_VARIABLE):
        with contextlib.suppress(ConfigError):  # a worker that needs it fails later with this error
            _pop_variable(variable)
    leave_number = leave_signal()
    signal.signal(signal.SIGTERM, _ignore)
    signal.signal(leave_number, _leave)
    # On Ctrl-C the control plane stops its workers; a worker started by hand stops itself.
    signal.signal(signal.SIGINT, _leave if by_hand else signal.SIG_IGN)
    if not by_hand:
        _die_with_parent(leave_number if cleans_up else signal.SIGKILL)
    try:
        main()
    except DisconnectedError as error:
        logging.getLogger(__name__).info("leaving: %s", error)
        _exit(EXIT_ORPHANED)
    except SlackwaterError as error:
        logging.getLogger(__name__).error("%s", error)
        _exit(2 if isinstance(error, ValueError) else 1)
    except SystemExit as leaving:
        if not isinstance(leaving.code, int | None):
            raise
        _exit(leaving.code or 0)
    _exit(0)


def _exit(status: int) -> None:
    """Exit without finalizing the interpreter while native code runs.

    Hazard: a daemon thread that returns from PyTorch during finalization is ended inside C++, which
    aborts the process: "terminate called without an active exception", status 134.
    """
    if "torch" not in sys.modules:
        sys.exit(status)
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler instead of SIG_IGN, which the programs that a worker starts would inherit."""


def _die_with_parent(number: signal.Signals) -> None:
    """Get a signal when the parent dies, even during a long operation."""
    parent = int(os.environ.pop(PARENT, os.getppid()))  # child processes must not inherit it
    die_with_parent(number)
    if os.getppid() != parent:  # hazard: it may have died before the call
        sys.exit(EXIT_ORPHANED)
