"""The version has one place, pyproject.toml; the release notes begin with it."""

import re
import tomllib

from pages import ROOT


def test_the_newest_release_notes_are_of_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest == version
