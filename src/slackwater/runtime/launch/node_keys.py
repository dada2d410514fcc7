"""Keys of nodes, derived from the fleet's secret, which no node gets. So no key has to be stored.

A key is valid for one node of one pool. Revoking it increments the node's generation, which is
saved in `nodes.json` of the state directory, and only a new token of the node works then.
"""

import hmac
import json
from pathlib import Path

from slackwater.model.errors import ConfigError
from slackwater.model.folder import write_whole
from slackwater.runtime.store.state_directory import StateDirectory


class NodeKeys:
    """The keys of the nodes of one service."""

    def __init__(self, state: StateDirectory) -> None:
        self._root = state.fleet_secret().encode()
        self._file: Path = state.root / "nodes.json"

    def key(self, node: str, pool: str | None) -> str:
        """The key of a node of a pool; without a pool, of one that the fleet file lists."""
        named = "\0".join(("slackwater node key 1", node, pool or "", str(self._generation(node))))
        return hmac.digest(self._root, named.encode(), "sha256").hex()

    def revoke(self, node: str) -> None:
        """Invalidate every key of the node that was given out."""
        generations = self._generations()
        generations[node] = generations.get(node, 0) + 1
        write_whole(self._file, json.dumps({"generations": generations}))

    def _generation(self, node: str) -> int:
        return self._generations().get(node, 0)

    def _generations(self) -> dict[str, int]:
        try:
            found = json.loads(self._file.read_text())["generations"]
            return {str(node): int(number) for node, number in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            # Continuing without the file would let revoked nodes in.
            fix = (
                f"cannot be read ({error}); restore it, or delete it to let revoked nodes in again"
            )
            raise ConfigError.of("nodes.json", str(self._file), fix) from None
