"""Names: one public class, one name; a message may be named alike in `control` and on the wire."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "slackwater"


def public_classes() -> dict[str, list[str]]:
    """Where each public class is defined, by its name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
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
