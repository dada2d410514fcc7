"""Compiled functions come with their first call, and no service pays for them before."""

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slackwater.policy.compiled import stable_order

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


@given(st.lists(st.sampled_from([0.0, -0.0, 1.5, 2.0, -3.0, np.inf, -np.inf]), max_size=40))
def test_equal_values_keep_their_order(values: list[float]) -> None:
    given_values = np.array(values, float)
    expected = np.argsort(given_values, kind="stable")
    assert stable_order(given_values).tolist() == expected.tolist()
