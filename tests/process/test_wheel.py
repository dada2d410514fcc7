"""The wheel works without the checkout: up, train, plan, status and both kinds of dashboard.

No index is asked: what it depends on is seen where the tests see it.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 700.0


@pytest.mark.timeout(900)
def test_the_wheel_alone_serves_trains_and_plans(tmp_path: Path) -> None:
    """See the script, which starts a service from an empty folder and stops it."""
    seen = [path for path in sys.path if path.endswith("site-packages")]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "DEPENDENCIES": ":".join(seen),
        "TMPDIR": str(tmp_path),
        "HOME": str(tmp_path),
    }
    with subprocess.Popen(
        ["bash", str(ROOT / "scripts" / "check_wheel.sh"), sys.executable],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # it stops its service
            said, _ = process.communicate(timeout=60.0)
    assert process.returncode == 0, said[-5000:]
    assert "the wheel works" in said
    assert "reward" in said and "saves" in said
