"""Two tenants: whatever the loud one does, the quiet one is served, and about as soon as alone."""

from pathlib import Path

import numpy as np
import pytest

from slackwater.bench.service.tenants import ATTACKS, Attack, TwoTenants, latencies

from .service_process import wait_for

pytestmark = pytest.mark.process

# Twice as long as alone, and this for a machine that does other things too: the faults that this is about
# took from half a minute to for ever. `slackwater bench tenants` measures sharply.
ALLOWANCE_S = 5.0
# Of processor time, which does not hang on what else the machine does. Bodies read on the loop held it for 0.15 to 0.2 s, turns
# begun and stopped in one go for as long.
LONGEST_HOLD_CPU_S = 0.12


def test_a_quiet_tenant_is_served_whatever_a_loud_one_does(
    tiny_model: Path, tmp_path: Path
) -> None:
    with TwoTenants(tmp_path, tiny_model) as service, service.client("quiet") as quiet:
        latencies(quiet, 3)
        alone_s, failed = latencies(quiet, 20)
        assert not failed
        # What the service does once, at its start and for its first request, is no attack's doing.
        held = "slackwater_loop_longest_cpu_s"
        wait_for("a loop at rest", lambda: service.gauge(held) <= LONGEST_HOLD_CPU_S, 60)
        allowed_s = 2 * float(np.percentile(alone_s, 99)) + ALLOWANCE_S
        for name in ATTACKS:
            with Attack(service, name):
                taken_s, failed = latencies(quiet, 10)
                held_cpu_s = service.gauge(held)
            assert not failed, f"{name}: {failed} requests of the quiet tenant were refused"
            assert np.percentile(taken_s, 99) <= allowed_s, f"{name}: {max(taken_s):.1f} s"
            assert held_cpu_s <= LONGEST_HOLD_CPU_S, f"{name}: {held_cpu_s:.3f} s"
