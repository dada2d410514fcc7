"""Over a link that is really slow: one copy crosses, and everybody has it."""

import subprocess

import pytest

from slackwater.bench.namespaces import can_make_hosts, hosts
from slackwater.bench.weights.sync import pulled


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
