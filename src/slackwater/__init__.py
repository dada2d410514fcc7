"""Slackwater: RL post-training of language models on the slack of a GPU fleet.

    @slackwater.phase("rollout" | "train" | "sync")    a function that runs under a permit
    @slackwater.runtime_hook                           a function that says how far the phase is
    slackwater.join(name, iterations=...)              say which job this process is

They are loaded when they are first used: importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slackwater.phases.decorators import phase, runtime_hook
    from slackwater.phases.job import join

__all__ = ["join", "phase", "runtime_hook"]

_WHERE = {
    "phase": "slackwater.phases.decorators",
    "runtime_hook": "slackwater.phases.decorators",
    "join": "slackwater.phases.job",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'slackwater' has no attribute {name!r}")
