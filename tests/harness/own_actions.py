"""A service of one sandbox and nothing else, for one test or benchmark."""

from contextlib import AbstractContextManager
from pathlib import Path

from slackwater.cli.own_service import start_service


def own_actions(state: Path, *options: str) -> AbstractContextManager[tuple[str, str]]:
    """Yields the URL and the key."""
    return start_service(state, "--engines", "0", "--trainers", "0", "--sandboxes", "1", *options)
