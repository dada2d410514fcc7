"""Verifiable tasks that need no data: each prompt is a number, and the same number is the same task."""

from slackwater.rl.environments.arithmetic import Arithmetic
from slackwater.rl.environments.copy_digits import CopyDigits
from slackwater.rl.environments.frozen_lake import FrozenLake
from slackwater.rl.environments.guess_number import GuessNumber

AnyEnvironment = Arithmetic | CopyDigits | FrozenLake | GuessNumber

__all__ = ["AnyEnvironment", "Arithmetic", "CopyDigits", "FrozenLake", "GuessNumber"]
