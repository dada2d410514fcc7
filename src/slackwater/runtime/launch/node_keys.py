"""Every node's own key: derived from the fleet's secret, which no node gets, so that nothing has to
be kept of it.

A key holds for one node of one pool, until it is revoked: then the node's generation, kept in
`nodes.json` of the state directory, is the next, and only a new token of the node works.
"""

import hmac
import json
from pathlib import Path

from slackwater.model.errors import ConfigError
from slackwater.runtime.store.state_directory import StateDirectory, write_whole


class NodeKeys:
    """The keys of the nodes of the service that keeps its state there."""

    def __init__(self, state: StateDirectory) -> None:
        self._root = state.fleet_secret().encode()
        self._file: Path = state.root / "nodes.json"

    def key(self, node: str, pool: str | None) -> str:
        """What the node of this pool proves; without a pool, one that the fleet file lists."""
        named = "\0".join(("slackwater node key 1", node, pool or "", str(self._generation(node))))
        return hmac.digest(self._root, named.encode(), "sha256").hex()

    def revoke(self, node: str) -> None:
        """No key of the node that was given out works from now on."""
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
            # To go on as if nothing were revoked would let revoked nodes in.
            fix = (
                f"cannot be read ({error}); restore it, or delete it to let revoked nodes in again"
            )
            raise ConfigError.of("nodes.json", str(self._file), fix) from None
