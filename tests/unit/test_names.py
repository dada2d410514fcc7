"""Names: functions are verbs, classes are nouns, and one public class has one name.

`python tests/unit/test_names.py [PACKAGE ...]` lists the names that break a rule.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "slackwater"

# Verbs and nouns that end like a participle.
_NO_PARTICIPLE = re.compile("bed|embed|exceed|feed|heed|need|proceed|seed|shed|speed|succeed")
_PARTICIPLE = re.compile(
    "begun|bound|brought|built|chosen|done|drawn|driven|fallen|fell|felt|forgotten|found|given|gone"
    "|got|grown|heard|held|hidden|kept|known|laid|led|left|lent|lost|made|meant|met|paid|risen|said"
    "|seen|sent|shown|slept|sold|spent|stood|struck|stuck|taken|taught|thought|thrown|told"
    "|understood|woken|won|worn|written|[a-z]{2,}ed"
)
_NO_VERB = re.compile(
    "alone|another|apart|at|aside|between|by|every|how|in|no|not|of|one|other|others|over|some"
    "|together|what|where|who|whose|why"
)
_NO_NOUN = re.compile("alone|apart|aside|at|between|by|in|of|on|over|together|way|with")
# `of` names a constructor and `phase` is a decorator.
_EXEMPT = re.compile(r"\S+ of|phases/decorators\.py:\d+ phase")
_ATTRIBUTES = {"property", "cached_property", "setter"}


def _is_participle(word: str) -> bool:
    return bool(_PARTICIPLE.fullmatch(word)) and not _NO_PARTICIPLE.fullmatch(word)


def _is_attribute(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = (ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list)
    return any(name.split(".")[-1] in _ATTRIBUTES for name in names)


def _names_nothing_that_it_does(name: str) -> bool:
    """Whether a function is called by a participle (`_told`) or by no verb at all (`_of`)."""
    first = name.strip("_").split("_")[0]
    return _is_participle(first) or bool(_NO_VERB.fullmatch(first))


def _is_no_noun(name: str) -> bool:
    """Whether a class is a participle alone (`Asked`), or ends in a particle (`OpOver`)."""
    words = [word.lower() for word in re.findall(r"[A-Z][a-z]*", name)]
    if not words:
        return True
    return (len(words) == 1 and _is_participle(words[0])) or bool(_NO_NOUN.fullmatch(words[-1]))


def broken_names(package: str = "") -> Iterator[str]:
    """`file:line name` of each function, class and call of a package that breaks a rule."""
    for path in sorted((SOURCE / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    wrong = not _is_attribute(node) and _names_nothing_that_it_does(name)
                case ast.ClassDef(name=name):
                    wrong = _is_no_noun(name)
                case ast.Call(args=args):
                    name = "*(...) in a call"
                    wrong = any(
                        isinstance(each, ast.Starred) and isinstance(each.value, ast.Tuple)
                        for each in args
                    )
                case _:
                    continue
            if wrong:
                yield f"{path.relative_to(SOURCE).as_posix()}:{node.lineno} {name}"


def test_functions_are_verbs_and_classes_are_nouns() -> None:
    assert [name for name in broken_names() if not _EXEMPT.fullmatch(name)] == []


@pytest.mark.parametrize("name", ["_told", "sent_by", "_of_relays", "alone"])
def test_a_participle_or_a_particle_names_no_function(name: str) -> None:
    assert _names_nothing_that_it_does(name)
    assert not _names_nothing_that_it_does(f"find_{name}")


def public_classes() -> dict[str, list[str]]:
    """Where each public class is defined, by its name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(SOURCE).as_posix())
    return found


def test_no_two_public_classes_have_one_name() -> None:
    twice = {
        name: places
        for name, places in public_classes().items()
        if len(places) > 1 and {place.split("/")[0] for place in places} != {"control", "wire"}
    }
    assert twice == {}


if __name__ == "__main__":
    for given in sys.argv[1:] or [""]:
        print(*broken_names(given), sep="\n")
