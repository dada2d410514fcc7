"""Compiled functions come with their first call, and no service pays for them before."""

import subprocess
import sys

_BEFORE_AND_AFTER = """
import sys
import slackwater.runtime.plane
assert not {"numba", "alembic"} & set(sys.modules)
from slackwater.policy.placement import ring
from slackwater.policy import compiled
before = compiled.copy_row
import numpy as np
into = np.zeros(3)
before(into, np.ones(3), 2)
assert into.tolist() == [1.0, 1.0, 0.0]
assert hasattr(compiled.copy_row, "signatures"), "the stand-in is still there"
assert ring.copy_row is compiled.copy_row, "a compiled function would call a stand-in"
before(into, np.ones(3), 3)
assert into.tolist() == [1.0, 1.0, 1.0]
"""


def test_a_plane_imports_neither_numba_nor_alembic_and_the_first_call_compiles() -> None:
    subprocess.run([sys.executable, "-c", _BEFORE_AND_AFTER], check=True, timeout=120)
