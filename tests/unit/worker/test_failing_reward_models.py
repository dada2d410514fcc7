"""Reward models of one worker: a corrupt one fails by itself."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from slackwater.engine.config import EngineConfig
from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.model.ids import ServiceName
from slackwater.worker.reward_worker import RewardServices
from slackwater.zoo.tiny import make_model

GOOD, CUT = ServiceName("good"), ServiceName("cut")
TEXT = list(range(20, 40))


def test_a_truncated_model_fails_with_its_reason_and_the_others_score(tmp_path: Path) -> None:
    make_model("tiny", tmp_path / "good", 1)
    shutil.copytree(tmp_path / "good", tmp_path / "cut")
    weights = tmp_path / "cut/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    services = RewardServices(["cpu"], EngineConfig(kv_bytes=8 << 20, page_bytes=2 << 20))
    staged = [services.stage_or_fail(name, partial(Path, tmp_path, name)) for name in (CUT, GOOD)]
    assert staged[0] is None
    assert staged[1] is not None
    assert staged[1].service == GOOD
    assert list(services.failed) == [CUT]
    assert "SafetensorError" in services.failed[CUT]
    assert str(tmp_path) not in services.failed[CUT]
    for ask in (
        lambda: services.restore(CUT, (0,)),
        lambda: services.logprobs(CUT, (0,), TEXT),
    ):
        with pytest.raises(RefusedError, match=r"'cut' failed to load: SafetensorError"):
            ask()
    services.restore(GOOD, (0,))
    assert np.isfinite(services.logprobs(GOOD, (0,), TEXT)).all()


def test_files_that_cannot_be_fetched_just_now_are_no_failure_of_the_model() -> None:
    services = RewardServices(["cpu"], EngineConfig(kv_bytes=8 << 20, page_bytes=2 << 20))

    def find() -> Path:
        raise UnavailableError("the depot does not answer")

    with pytest.raises(UnavailableError):
        services.stage_or_fail(GOOD, find)
    assert not services.failed
