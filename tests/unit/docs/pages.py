"""The documentation as the tests read it: pages, and what stands in their fences."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")])
_MARKER = re.compile(r"<!-- (.+) -->")


@dataclass(frozen=True, slots=True)
class Block:
    """Code of a page: fenced under its language, or indented (language `indented`).

    `marker` is the comment on the line above a fence: `needs a service`, `toml: fleet`.
    """

    page: str
    line: int
    language: str
    marker: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[Block]:
    """All code of a page, in order."""
    name, lines = name_of(page), page.read_text(encoding="utf-8").split("\n")
    index, in_list = 0, False
    while index < len(lines):
        line = lines[index]
        fence = re.match(r"(\s*)```(\w*)", line)
        if fence:
            end = next(k for k in range(index + 1, len(lines)) if lines[k].strip() == "```")
            cut = len(fence[1])
            text = "\n".join(found[cut:] for found in lines[index + 1 : end])
            marker = _MARKER.fullmatch(lines[index - 1].strip()) if index else None
            yield Block(name, index + 1, fence[2], marker[1] if marker else "", text)
            index = end + 1
            continue
        if line.startswith("    ") and not in_list:
            yield Block(name, index + 1, "indented", "", line.strip())
        if line.strip():
            in_list = bool(re.match(r"\s*([-*]|\d+\.) ", line)) or (in_list and line[0] == " ")
        index += 1


def every_block(*languages: str) -> list[Block]:
    """Code of all pages in one of these languages."""
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines outside of fences."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line
