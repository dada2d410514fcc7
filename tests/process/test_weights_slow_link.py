"""Over a link that is really slow: one copy crosses, and everybody has it."""

import subprocess

import pytest

from slackwater.bench.weights.namespaces import may_make_namespaces, slow_site
from slackwater.bench.weights.sync import pulled


@pytest.mark.process
@pytest.mark.skipif(not may_make_namespaces(), reason="this user may make no network namespaces")
def test_one_copy_crosses_a_slow_link_and_nothing_of_the_network_is_left() -> None:
    with slow_site(2, 200) as site:
        names = [site.sender, *(name for name, _ in site.receivers)]
        found = pulled(site, 8 << 20, 0, flat=False)
    assert found["exact"]
    assert found["crossed"] == 8 << 20
    assert found["delta_bytes"] < 0.03 * (8 << 20)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert not any(name in left.stdout for name in names)
