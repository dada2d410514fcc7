"""An environment of your own, trained by the package's GRPO against a running service.

slackwater up                                   # in another terminal; prints a URL and a key
python examples/own_environment.py URL KEY [STEPS]
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tinker

from slackwater.rl.environments.episode import EnvironmentReply
from slackwater.rl.grpo import run
from slackwater.rl.recipe import GrpoSettings, ModelSettings, Recipe, SamplingSettings
from slackwater.rl.run_directory import RunDirectory
from slackwater.rl.sdk_client import closing


@dataclass(frozen=True)
class LowBytes:
    """Answer with bytes below 128: the reward is their share. One turn, and the same task for every
    prompt.
    """

    kind: str = "low-bytes"
    prompts: int = 1000

    def episode(self, prompt: int) -> "Ask":
        return Ask()

    def demonstration(self, prompt: int) -> tuple[tuple[str, str], ...]:
        return (("say something:", "abc"),)


@dataclass(frozen=True)
class Ask:
    first_observation: str = "say something:"

    def answer(self, text: str) -> EnvironmentReply:
        return EnvironmentReply(
            "", sum(character.isascii() for character in text) / max(len(text), 1), True
        )


url, key = sys.argv[1:3]
steps = int(sys.argv[3]) if len(sys.argv) > 3 else 5
recipe = Recipe(
    environment=LowBytes(),  # type: ignore[arg-type]  # the recipes of the package name theirs
    model=ModelSettings(base="tiny"),
    sampling=SamplingSettings(max_tokens=6),
    grpo=GrpoSettings(steps=steps, groups=4, max_groups=8, group_size=4, learning_rate=3e-3),
)
with (
    tempfile.TemporaryDirectory() as folder,
    closing(tinker.ServiceClient(base_url=url, api_key=key)) as service,
):
    files = RunDirectory(Path(folder), recipe)
    run(recipe, service, files, lambda *_: None)
    for row in files.metrics():
        print(f"step {row['step']:3}  reward {row['reward']:.3f}")
