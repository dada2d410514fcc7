"""Join tokens: what a machine needs to join a fleet as a node."""

import base64
import json
from typing import Any

from slackwater.model.errors import ConfigError

_FIELDS = ("hub", "depot", "node", "key", "pool", "pin")


def write_token(join: dict[str, Any]) -> str:
    """A node's join token. It holds the node's key: keep it secret."""
    return base64.urlsafe_b64encode(json.dumps(join).encode()).decode()


def read_token(token: str) -> dict[str, Any]:
    try:
        join = json.loads(base64.urlsafe_b64decode(token))
        return {field: join[field] for field in _FIELDS}
    except (ValueError, KeyError, TypeError):
        fix = "is not a token; make one with `slackwater node token NODE` where the service runs"
        raise ConfigError.of("--join-file", f"{token[:8]}...", fix) from None
