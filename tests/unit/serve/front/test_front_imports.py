"""A front end starts soon: it holds no control plane and no store."""

import subprocess
import sys

SCRIPT = """
import sys
import slackwater.serve.front.__main__
print(sorted({"slackwater.runtime.plane", "sqlalchemy", "numba", "torch"} & set(sys.modules)))
"""


def test_a_front_end_imports_neither_the_control_plane_nor_a_store() -> None:
    command = [sys.executable, "-c", SCRIPT]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "[]"
