"""One GRPO job as a process of its own, through the public SDK; writes down what it sampled, its losses and when each step ended.

    python -m slackwater.bench.coscheduling.grpo_driver URL JOB RECIPE FOLDER [A.B=C ...]

The key is in `SLACKWATER_KEY`. The client knows nothing of phases or permits: it names its job, and that is all.
"""

import json
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from slackwater.rl.grpo import run
from slackwater.rl.recipe import load_recipe
from slackwater.rl.run_directory import RunDirectory


class _Heard:
    """A client that passes everything on, and remembers the answers that were sampled through it."""

    def __init__(self, inner: Any, futures: list[Any]) -> None:
        self._inner = inner
        self._futures = futures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_lora_training_client(self, *arguments: Any, **options: Any) -> "_Heard":
        made = self._inner.create_lora_training_client(*arguments, **options)
        return _Heard(made, self._futures)

    def save_weights_and_get_sampling_client(self) -> "_Heard":
        return _Heard(self._inner.save_weights_and_get_sampling_client(), self._futures)

    def sample(self, **options: Any) -> Any:
        future = self._inner.sample(**options)
        self._futures.append(future)
        return future


def main(url: str, job: str, recipe: str, folder: Path, changes: list[str]) -> None:
    """Run the job to its end."""
    import tinker

    settings = load_recipe(recipe, changes)
    futures: list[Any] = []
    ended_s: list[float] = []
    losses: list[float] = []

    def watch(step: int, metrics: dict[str, float]) -> None:
        del step
        ended_s.append(time.time())
        losses.append(metrics.get("optim/loss", 0.0))

    began_s = time.time()
    with (
        closing(RunDirectory(folder, settings)) as files,
        tinker.ServiceClient(
            base_url=url,
            api_key=os.environ["SLACKWATER_KEY"],
            user_metadata={"slackwater_job": job},
        ) as service,
    ):
        run(settings, _Heard(service, futures), files, watch)  # type: ignore[arg-type]
        tokens = [[list(s.tokens) for s in future.result().sequences] for future in futures]
    result = {"began_s": began_s, "ended_s": ended_s, "losses": losses, "tokens": tokens}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5:])
