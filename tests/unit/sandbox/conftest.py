"""Every test of actions runs with each backend, and with each way to fence, that this
machine has.
"""

from collections.abc import Iterator

import pytest
from sandbox_stage import Stage, a_stage, bubblewrap_missing


@pytest.fixture(
    scope="module", params=["process", "process pinned", "bubblewrap", "bubblewrap pinned"]
)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    backend, _, pinned = request.param.partition(" ")
    if backend == "bubblewrap" and (why := bubblewrap_missing()) is not None:
        pytest.skip(f"this machine has no working bubblewrap: {why}")
    with a_stage(backend, bool(pinned)) as made:
        made.supervisor.open("e")
        yield made
