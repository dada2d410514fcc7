"""What process tests share: a tiny model, and a service."""

import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from harness import forked_service
from harness.forked_tests import GROUP
from harness.ports import free_port

from .service_process import (
    ServiceProcess,
    sdk_clients_closed,
    sdk_sessions_ended,
    wait_for,
)

# Those that take longest begin first, so that none of them is still running alone when the others
# are done. In a new clone the first engine compiles its loops, for all: no engine runs beside it.
LONGEST = (
    *("serve_hostile", "action_chaos", "action_service", "wheel"),
    *("demo", "examples", "serve_faults", "recipes", "permits"),
    *("slo_clock", "rentals", "serve_start", "coserving", "sharded_trainer", "rollout_service"),
    *("submitted_jobs", "front_ends", "plane_death", "kubernetes_pods", "sleeping_server"),
    *("weights_slow_link", "weight_relays", "decorated_jobs", "train_resume", "compatibility"),
    *("fleet", "agent_tools", "data_recipes", "serve_two_tenants", "rollout_kills"),
    *("local_engines", "upgrade", "switched_models"),
    *("reward_worker", "served_promise", "rollout_liars", "moved_models", "many_jobs"),
)

# Files whose tests share the `service` below: each of these groups starts one.
SHARING = (
    ("serve_hostile", "serve_clients", "openai_api", "export"),
    ("serve_start", "examples", "switched_models", "train_resume"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    sharing = {f"test_{name}": group[0] for group in SHARING for name in group}
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.stem in sharing:
            item.stash[GROUP] = sharing[item.path.stem]
    items.sort(key=lambda item: order.get(item.path.stem, 99) if item.path.parent == here else -1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: "pytest.CallInfo[None]"
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Beside a test that failed stands what the services that it may have used said last."""
    report = yield
    if report.failed and call.when == "call" and Path(__file__).parent in item.path.parents:
        for state, service in list(ServiceProcess.running.items()):
            report.sections.append((f"service {state.parent.name}", service.account()))
    return report


@pytest.fixture(scope="session", autouse=True)
def the_suite_ends_silent() -> Iterator[None]:
    """After the last test no session of the SDK sends heartbeats or telemetry, which would fail
    aloud for lack of a service.
    """
    yield
    if forked_service.programs.cache_info().currsize:
        forked_service.programs().close()
    if "tinker" in sys.modules:
        wait_for("the SDK's last session", sdk_sessions_ended, 120)


@pytest.fixture(scope="module", autouse=True)
def sdk_clients_end_with_their_tests() -> Iterator[None]:
    """Their threads would go on sending heartbeats to services that are gone, and say so after the
    last test.
    """
    with sdk_clients_closed():
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that reads bytes."""
    from slackwater.zoo.tiny import make_model

    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_model("tiny", directory, 0)
    return directory


@pytest.fixture
def new_service(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., ServiceProcess]]:
    """Makes services, and stops them all."""
    made: list[ServiceProcess] = []

    def make(*options: str, name: str = "tiny") -> ServiceProcess:
        state = tmp_path / f"state{len(made)}"
        made.append(ServiceProcess(state, tiny_model, free_port(), *options, name=name))
        return made[-1]

    yield make
    for service in made:
        if service.process is not None:
            service.stop()


@pytest.fixture(scope="session")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """One service for all tests that leave it as they found it; it has two tenants."""
    shared = ServiceProcess(
        tmp_path_factory.mktemp("service") / "state",
        tiny_model,
        free_port(),
        *("--tenant", "default", "--tenant", "other"),
    )
    shared.start()
    shared.wait_for_workers()
    yield shared
    assert shared.stop() == 0
