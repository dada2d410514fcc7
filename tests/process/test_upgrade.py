"""A state directory of version 0.1.0, killed in its work and moved elsewhere, opens and goes on."""

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from tinker import types

from harness.ports import free_port

from .service_process import ServiceProcess

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

# Written by version 0.1.0 over the tiny model of seed 0: two steps, a saved state, a third step, a
# saved sampler, two more steps.
KEPT = Path(__file__).with_name("data") / "state-0.1.0.tar.xz"
MODEL = "tinker://cb32dc8857aecb9de65cb808:train:0"
LOSSES_AFTER_THE_SAVE = [7.884673118591309, 2.9450769424438477, 1.0326786041259766]
SAMPLED = [184, 243, 116, 56, 248, 220, 117, 256]


@pytest.fixture(scope="module")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("upgrade")
    with tarfile.open(KEPT) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not there before 3.11.4
        archive.extractall(folder)
    upgraded = ServiceProcess(folder / "state-0.1.0", tiny_model, free_port())
    upgraded.start()
    upgraded.wait_for_workers()
    yield upgraded
    assert upgraded.stop() == 0


def test_a_sampler_saved_by_0_1_0_gives_the_same_tokens(service: ServiceProcess) -> None:
    client = tinker.ServiceClient(base_url=service.url, api_key=service.key)
    sampler = client.create_sampling_client(model_path=f"{MODEL}/sampler_weights/sampler")
    params = types.SamplingParams(max_tokens=8, seed=5, temperature=1.0)
    result = sampler.sample(types.ModelInput.from_ints([65, 66, 67]), 1, params).result(timeout=120)
    assert list(result.sequences[0].tokens) == SAMPLED


def test_a_state_saved_by_0_1_0_trains_on_as_it_did(service: ServiceProcess) -> None:
    client = tinker.ServiceClient(base_url=service.url, api_key=service.key)
    trainer = client.create_training_client_from_state_with_optimizer(f"{MODEL}/weights/half")
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([65, 66, 67, 68]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=[66, 67, 68, 69], dtype="int64", shape=[4]),
            "weights": types.TensorData(data=[1.0] * 4, dtype="float32", shape=[4]),
        },
    )
    losses = []
    for _ in LOSSES_AFTER_THE_SAVE:
        passed = trainer.forward_backward([datum], "cross_entropy")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passed.result(timeout=120).metrics["loss:sum"])
        stepped.result(timeout=120)
    assert losses == pytest.approx(LOSSES_AFTER_THE_SAVE, rel=1e-5)
