"""Verifiable tasks: a prompt is a number that determines the task, or a row of a data set."""

from slackwater.model.errors import ConfigError
from slackwater.rl.actions import ActionThread
from slackwater.rl.environments.arithmetic import Arithmetic, CopyDigits, CountingTask
from slackwater.rl.environments.coding import Coding
from slackwater.rl.environments.data_tasks import DataTasks
from slackwater.rl.environments.episode import EpisodeEnvironment
from slackwater.rl.environments.frozen_lake import FrozenLake
from slackwater.rl.environments.guess_number import GuessNumber

AnyEnvironment = (
    Arithmetic | Coding | CopyDigits | CountingTask | DataTasks | FrozenLake | GuessNumber
)


def needs_sandboxes(environment: AnyEnvironment) -> bool:
    """Whether the environment runs programs of the model."""
    return isinstance(environment, Coding)


def playable(environment: AnyEnvironment, actions: ActionThread | None) -> EpisodeEnvironment:
    """The environment; with the action service if it runs programs."""
    if not isinstance(environment, Coding):
        return environment
    if actions is None:
        raise ConfigError.of("environment.kind", environment.kind, "needs a service with sandboxes")
    return environment.on(actions)
