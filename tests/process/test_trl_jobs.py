"""TRL's own trainer under the decorators; skipped where the peers extra is not installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None, reason="needs the peers extra (trl)"
    ),
]


def test_a_trl_job_runs_its_phases_offline() -> None:
    example = Path(__file__).parents[2] / "examples" / "trl_two_jobs.py"
    environment = os.environ | {"SLACKWATER_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    found = subprocess.run(
        [sys.executable, str(example), "mine", "0"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=840,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert "mine: step 10 of 10" in found.stdout
