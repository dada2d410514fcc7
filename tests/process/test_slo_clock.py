"""The slowdown that the service reports, against a clock outside of it, beside jobs that nobody
knows.
"""

from collections.abc import Callable

import pytest

from harness.slo_clock import SLO, PhaseLengths, run_beside_strangers
from slackwater.cli.demo import two_nodes

from .service_process import ServiceProcess

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def test_a_member_beside_unknown_jobs_is_as_slow_as_the_service_says(
    new_service: Callable[..., ServiceProcess], tmp_path_factory: pytest.TempPathFactory
) -> None:
    fleet = tmp_path_factory.mktemp("fleet") / "fleet.toml"
    fleet.write_text(two_nodes())
    service = new_service("--fleet", str(fleet), "--set", "coschedule.placement=group")
    service.start()
    found = run_beside_strangers(service.url, service.key, "tiny", 6, PhaseLengths(0.6, 0.4, 0.3))
    assert found.samples > 20
    assert found.widest_gap <= 0.05, found
    # A step that nobody has seen takes longer than anybody guesses on a machine that is busy.
    assert found.slowdown - found.unsure <= SLO + 0.5, found
