"""API keys and their tenants, in a file that only the owner can read; the tenants' live turns."""

import hmac
import json
import secrets
from collections import Counter
from collections.abc import Collection, Sequence

from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.folder import write_whole
from slackwater.model.ids import JobId, TenantId, check_tenant
from slackwater.runtime.store.state_directory import StateDirectory

_JOB_KEY = "tml-job:"


class Tenants:
    """Maps keys to tenants. A key begins with `tml-`, which the SDK requires."""

    def __init__(self, keys: dict[str, TenantId]) -> None:
        self._keys = keys

    @classmethod
    def open(cls, state: StateDirectory, names: Sequence[str]) -> "Tenants":
        """Read the keys of the state directory; new tenants get a key."""
        path = state.keys_file
        try:
            stored = json.loads(path.read_text()) if path.exists() else {}
            keys = {str(key): str(tenant) for key, tenant in stored.items()}
        except (ValueError, AttributeError):
            raise ConfigError.of("keys file", str(path), "is not JSON; fix or remove it") from None
        known = {key: check_tenant(name, f"keys file {path}") for key, name in keys.items()}
        new = [
            check_tenant(name, "--tenant")
            for name in dict.fromkeys(names)
            if name not in keys.values()
        ]
        known |= {f"tml-{secrets.token_urlsafe(24)}": name for name in new}
        if new:
            write_whole(path, json.dumps(known, indent=2))
        return cls(known)

    def keys(self) -> dict[str, TenantId]:
        return self._keys

    def find_by_key(self, key: str) -> TenantId | None:
        found = self._keys.get(key)
        if found is None and key.startswith(_JOB_KEY):
            found, _ = self._parse_job_key(key)
        return found

    def job_key(self, tenant: TenantId, name: str) -> str:
        """A tenant's key for one job: every request with it belongs to that job.

        It is derived from the tenant's key, which it does not reveal, and is not stored.
        """
        if ":" in name:  # colons separate the parts of a key
            raise ConfigError.of("job", name, "must not have a colon")
        secret = self.key_of(tenant).encode()
        proof = hmac.new(secret, f"job {name}".encode(), "sha256").hexdigest()[:40]
        return f"{_JOB_KEY}{tenant}:{name}:{proof}"

    def key_of_job(self, job: JobId) -> str:
        tenant, _, name = job.partition("/")
        return self.job_key(TenantId(tenant), name)

    def job_of_key(self, key: str) -> str | None:
        """The job of a job key; None for an ordinary key."""
        return self._parse_job_key(key)[1] if key.startswith(_JOB_KEY) else None

    def _parse_job_key(self, key: str) -> tuple[TenantId | None, str | None]:
        tenant, _, rest = key.removeprefix(_JOB_KEY).partition(":")
        name = rest.partition(":")[0]
        if tenant not in self._keys.values():
            return None, None
        expected = self.job_key(TenantId(tenant), name)
        if not hmac.compare_digest(expected.encode(), key.encode()):
            return None, None
        return TenantId(tenant), name

    def key_of(self, tenant: str) -> str:
        return next(key for key, name in self._keys.items() if name == tenant)

    def names(self) -> list[str]:
        return sorted(set(self._keys.values()))


class TurnShares:
    """Limits the live turns of each tenant, of every API, to an equal share."""

    def __init__(self, max_live_turns: int, tenants: Collection[str]) -> None:
        self.share = max(max_live_turns // max(len(tenants), 1), 1)
        self._live: Counter[TenantId] = Counter()

    def check(self, tenant: TenantId, turns: int, field: str) -> None:
        """Raise if a tenant can never have so many turns (`field` is too large), or not now."""
        if turns > self.share:
            raise ConfigError.of(field, turns, f"must be at most {self.share} in one request")
        live = self._live[tenant]
        if live + turns > self.share:
            raise UnavailableError(
                f"{live} samples of yours are under way, {turns} more would be above your share of "
                f"{self.share}; try again"
            )

    def take(self, tenant: TenantId, turns: int) -> None:
        self._live[tenant] += turns

    def give_back(self, tenant: TenantId, turns: int) -> None:
        self._live[tenant] -= turns
        assert self._live[tenant] >= 0, "a tenant gave back more turns than it took"

    def live(self) -> dict[TenantId, int]:
        return {tenant: count for tenant, count in self._live.items() if count}
