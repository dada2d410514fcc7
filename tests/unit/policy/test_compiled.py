"""Compiled functions come with their first call, and no service pays for them before."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slackwater.policy import compiled
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


_COMPILE = """
import numpy as np
from slackwater.policy.compiled import copy_row
copy_row(np.zeros(3), np.ones(3), 2)
"""


def test_a_cache_that_names_a_class_of_an_earlier_version_is_made_again(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _COMPILE]
    subprocess.run(command, check=True, timeout=120, env=environment)
    (index,) = tmp_path.rglob("*copy_row*.nbi")
    index.write_bytes(pickle.dumps(numba.__version__) + b"cslackwater.policy.compiled\nGone\n.")
    subprocess.run(command, check=True, timeout=120, env=environment)
    assert b"Gone" not in index.read_bytes()


def test_a_change_to_any_compiled_file_makes_every_cache_stale(tmp_path: Path) -> None:
    """The change may be in a function that the cached one calls."""
    sources = Path(compiled.__file__).parents[1]
    copy = tmp_path / "slackwater"
    shutil.copytree(sources, copy, ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "c")}
    command = [sys.executable, "-c", _COMPILE]
    subprocess.run(command, check=True, timeout=120, env=environment)
    (index,) = tmp_path.rglob("*copy_row*.nbi")
    before = index.read_bytes()
    subprocess.run(command, check=True, timeout=120, env=environment)
    assert index.read_bytes() == before
    with (copy / "policy" / "placement" / "ring.py").open("a") as file:
        file.write("# changed\n")
    subprocess.run(command, check=True, timeout=120, env=environment)
    assert index.read_bytes() != before


@given(st.lists(st.sampled_from([0.0, -0.0, 1.5, 2.0, -3.0, np.inf, -np.inf]), max_size=40))
def test_equal_values_keep_their_order(values: list[float]) -> None:
    given_values = np.array(values, float)
    expected = np.argsort(given_values, kind="stable")
    assert stable_order(given_values).tolist() == expected.tolist()
