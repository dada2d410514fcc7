"""Every public method of the installed `tinker` SDK, called against a real service."""

import os
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from .compatibility import page as pages
from .compatibility import probes
from .cookbook import MODEL_NAME, Workspace
from .service_process import ServiceProcess

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*(DEPRECATED|experimental)")]

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"
NewService = Callable[..., ServiceProcess]


def reason(error: BaseException) -> str:
    """What a user reads, without ids that differ from run to run."""
    text = str(error)
    detail = re.search(r"'detail': ['\"](.+?)['\"][,}]", text)
    return " ".join((detail[1] if detail else f"{type(error).__name__}: {text}").split())


def outcome(method: str, how: Callable[[], probes.Call]) -> pages.Outcome:
    try:
        how().run(method.split(".")[1])
    except Exception as error:  # noqa: BLE001 - whatever the SDK raises is the finding
        return pages.Outcome(method, reason(error))
    return pages.Outcome(method, None)


@pytest.mark.timeout(900)
def test_at_least_nine_in_ten_public_methods_work_and_the_page_says_which(
    new_service: NewService, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = new_service(name=MODEL_NAME)
    service.start()
    workspace = Workspace.make(tmp_path / "work", tiny_model, service.url, service.key)
    monkeypatch.chdir(workspace.folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    table = probes.probes(probes.Bench.over(service.url, service.key, MODEL_NAME))
    outcomes = [
        outcome(method, table[method.removesuffix("_async")]) for method in probes.public_methods()
    ]
    written = pages.page(version("tinker"), outcomes)
    if "SLACKWATER_WRITE_COMPATIBILITY" in os.environ:
        PAGE.write_text(written)
    assert pages.supported_share(outcomes) >= 0.9, written
    assert PAGE.read_text() == written, (
        "docs/reference/compatibility.md is not what was found: make compatibility"
    )
