"""The compatibility page: what came of one call per public SDK method."""

from dataclasses import dataclass
from pathlib import Path

HEADER = Path(__file__).with_name("header.md").read_text()


@dataclass(frozen=True)
class Outcome:
    """What one method did."""

    method: str
    error: str | None

    @property
    def supported(self) -> bool:
        return self.error is None


def supported_share(outcomes: list[Outcome]) -> float:
    return sum(outcome.supported for outcome in outcomes) / len(outcomes)


def page(version: str, outcomes: list[Outcome]) -> str:
    """Markdown: the share, then a row a method."""
    count = sum(outcome.supported for outcome in outcomes)
    lines = [
        f"SDK `tinker` {version}: **{count} of {len(outcomes)}** public methods supported "
        f"({supported_share(outcomes):.0%}).\n",
        "| method | supported | if not, what it answers |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{o.method}` | {'yes' if o.supported else 'no'} | {(o.error or '').replace('|', '/')} |"
        for o in outcomes
    ]
    return HEADER + "\n".join(lines) + "\n"
