"""The compatibility page: what came of one call per public SDK method."""

from dataclasses import dataclass

HEADER = """# Compatibility with the `tinker` SDK

Written by `make compatibility`, which calls every public method of the installed SDK against a running service; the test suite checks
that it still holds. An unsupported method ends in the error shown, never in silence.

"""


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
        f"SDK `tinker` {version}: **{count} of {len(outcomes)}** public methods supported ({supported_share(outcomes):.0%}).\n",
        "| method | supported | if not, what it answers |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{o.method}` | {'yes' if o.supported else 'no'} | {(o.error or '').replace('|', '/')} |"
        for o in outcomes
    ]
    return HEADER + "\n".join(lines) + "\n"
