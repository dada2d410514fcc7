"""What the glossary names in code font exists."""

import re
from pathlib import Path

from pages import ROOT

from slackwater.cli.main import COMMANDS

SOURCE = ROOT / "src" / "slackwater"
_ROW = re.compile(r"^\| ([^|]+) \| (.+) \| ([^|]*) \|$", re.M)
_CLASS = re.compile(r"[A-Z][a-z]+[A-Za-z0-9]*")


def rows() -> list[tuple[str, str, str]]:
    page = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    return [row for row in _ROW.findall(page) if row[0] != "term"]


def source() -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(SOURCE.rglob("*.py")))


def test_files_classes_and_commands_of_the_glossary_exist() -> None:
    code, missing = source(), []
    for term, meaning, where in rows():
        for name in re.findall(r"`([^`]+)`", f"{meaning} {where}"):
            if name.startswith("slackwater "):
                known = name.split()[1] in COMMANDS
            elif "/" in name:
                known = (SOURCE / name).exists() or (ROOT / name).exists()
            elif _CLASS.fullmatch(name):
                known = re.search(rf"\bclass {name}\b|^{name} *[:=]", code, re.M) is not None
            else:
                known = re.search(rf"\b{re.escape(name.strip('[]'))}\b", code) is not None
            if not known:
                missing.append(f"{term}: {name}")
    assert not missing


def test_terms_are_sorted_and_defined_once() -> None:
    terms = [term.lower() for term, _, _ in rows()]
    assert len(terms) > 40
    assert terms == sorted(set(terms))


def test_every_package_has_a_line_on_the_page_of_the_architecture() -> None:
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")
    packages = {
        folder.name for folder in Path(SOURCE).iterdir() if (folder / "__init__.py").is_file()
    }
    assert {name for name in packages if f"| `{name}/` |" not in page} == set()


def test_the_paths_of_the_architecture_name_files_and_messages_that_exist_and_count_them() -> None:
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w/])([a-z_]+(?:/[a-z_]+)+\.py)", page)
    missing = {name for name in named if not ((SOURCE / name).exists() or (ROOT / name).exists())}
    assert not missing
    diagrams = "\n".join(re.findall(r"```mermaid\n(.+?)```", page, re.S))
    code, messages = source(), set(re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", diagrams))
    assert messages >= {"TurnSubmitted", "RunOp", "LendNode"}
    assert not {name for name in messages if not re.search(rf"^class {name}\b", code, re.M)}
    paths = re.findall(r"^### (.+?)$.*?^Files \((\d+)\): (.+?)\.$", page, re.M | re.S)
    assert len(paths) == 6
    for title, count, listed in paths:
        files = re.findall(r"`([^`]+\.py)`", listed)
        assert len(files) == len(set(files)) == int(count), title


def test_each_path_of_the_architecture_draws_the_files_that_it_lists() -> None:
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")
    path = r"^### (.+?)$.*?```mermaid\n(.+?)```.*?^Files \(\d+\): (.+?)\.$"
    paths = re.findall(path, page, re.M | re.S)
    assert len(paths) == 6
    for title, diagram, listed in paths:
        files = set(re.findall(r"`([^`]+\.py)`", listed))
        drawn = set(re.findall(r"(?<![\w/])[a-z_]+(?:/[a-z_]+)+\.py", diagram))
        folders = tuple(re.findall(r"(?<![\w/])(?:[a-z_]+/)+(?![a-z_])", diagram))
        assert drawn <= files, title
        assert not {name for name in files - drawn if not name.startswith(folders)}, title
