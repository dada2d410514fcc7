"""Links between pages lead somewhere, and lines fit a screen."""

import re
from pathlib import Path

import pytest
from pages import PAGES, ROOT, name_of, prose

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_WIDEST = 100


def anchor(heading: str) -> str:
    """As GitHub names a heading."""
    plain = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.lower()))
    return plain.strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    headings = (line.lstrip("#") for _, line in prose(page) if line.startswith("#"))
    return {anchor(heading) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_resolves(page: Path) -> None:
    broken = []
    for number, line in prose(page):
        for target in _LINK.findall(re.sub(r"`[^`]*`", "", line)):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, part = target.partition("#")
            found = (page.parent / file).resolve() if file else page
            if not found.exists() or (part and part not in anchors(found)):
                broken.append(f"{name_of(page)}:{number}: {target}")
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_fit_100_columns(page: Path) -> None:
    long = [
        f"{name_of(page)}:{number}"
        for number, line in prose(page)
        if len(line) > _WIDEST and not line.startswith(("|", "    ")) and "](" not in line
    ]
    assert not long


def test_the_index_leads_to_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {
        (index.parent / target.partition("#")[0]).resolve()
        for target in _LINK.findall(index.read_text(encoding="utf-8"))
    }
    kept_elsewhere = {index, *ROOT.glob("docs/decisions/*.md")}
    missing = set(ROOT.glob("docs/**/*.md")) - linked - kept_elsewhere
    assert not missing
