"""Finds the checkout whose `benchmarks/` the CLI runs; an installed wheel has none."""

import os
import sys
from pathlib import Path

from slackwater.model.errors import ConfigError


def load_benchmarks() -> None:
    """Make `benchmarks` and the tests' harness importable, here and in child processes."""
    beside_package = Path(__file__).resolve().parents[3]
    for root in (beside_package, Path.cwd()):
        if (root / "benchmarks" / "__init__.py").is_file():
            break
    else:
        fix = "is no checkout of slackwater; clone the repository and run benchmarks from there"
        raise ConfigError.of("working directory", str(Path.cwd()), fix)
    added = [str(root), str(root / "tests")]
    sys.path[:0] = [path for path in added if path not in sys.path]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*added, *([before] if before else [])])
