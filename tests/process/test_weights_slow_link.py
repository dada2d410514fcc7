"""Over a link that is really slow: one copy crosses, and everybody has it."""

import subprocess
import threading

import pytest

from benchmarks.weights.sync import pulled
from harness.namespaces import Host, can_make_hosts, hosts


@pytest.mark.process
@pytest.mark.skipif(not can_make_hosts(), reason="this user may make no network namespaces")
def test_one_copy_crosses_a_slow_link_and_nothing_of_the_network_is_left() -> None:
    with hosts(3) as site:
        site.hosts[0].shape(200)
        names = [host.name for host in site.hosts]
        found = pulled(site.hosts, 8 << 20, 0, flat=False)
    assert found["exact"]
    assert found["crossed"] == 8 << 20
    assert found["delta_bytes"] < 0.03 * (8 << 20)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert not any(name in left.stdout for name in names)


class Flapping:
    """A host whose link is cut and healed again and again, while in the context."""

    def __init__(self, host: Host, up_s: float, down_s: float) -> None:
        self._host, self._up_s, self._down_s = host, up_s, down_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._flap)
        self.cuts = 0

    def __enter__(self) -> "Flapping":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(60)

    def _flap(self) -> None:
        while not self._over.wait(self._up_s):
            self._host.cut()
            self.cuts += 1
            self._over.wait(self._down_s)
            self._host.heal()


@pytest.mark.process
@pytest.mark.skipif(not can_make_hosts(), reason="this user may make no network namespaces")
def test_a_version_and_its_delta_arrive_over_a_link_that_flaps() -> None:
    """Whole seconds without a packet, some of them in the middle of a bucket: pulls are late, and
    exact.
    """
    with hosts(2) as site:
        site.hosts[0].shape(20)
        with Flapping(site.hosts[0], up_s=0.4, down_s=1.0) as flapping:
            found = pulled(site.hosts, 4 << 20, 0, flat=False)
    assert flapping.cuts > 0
    assert found["exact"]
