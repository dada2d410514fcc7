"""Unmodified client libraries against a real service: the tinker SDK and the openai client."""

import asyncio
import json
import subprocess
import sys
from typing import Any

import openai
import pytest
import tinker
import torch
from tinker import types

from .service_process import ServiceProcess, sdk_clients_closed, wait_for

pytestmark = pytest.mark.process

TEXT = list(b"the tide turns twice a day")


def example(tokens: list[int]) -> types.Datum:
    weights = torch.ones(len(tokens) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor(tokens[1:])),
            "weights": types.TensorData.from_torch(weights),
        },
    )


@pytest.fixture(scope="module")
def sdk(service: ServiceProcess) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=service.url, api_key=service.key)


@pytest.fixture(scope="module")
def trained(sdk: tinker.ServiceClient) -> tinker.TrainingClient:
    """A model after three steps on one text."""
    client = sdk.create_lora_training_client(base_model="tiny", rank=4)
    for _ in range(3):
        client.forward_backward([example(TEXT)] * 2, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return client


def loss_of(client: tinker.TrainingClient) -> float:
    return client.forward([example(TEXT)], "cross_entropy").result().metrics["loss:sum"]


@pytest.mark.parametrize("rank", [0, 8])
def test_training_lowers_the_loss_for_full_weights_and_adapters(
    sdk: tinker.ServiceClient, rank: int
) -> None:
    client = sdk.create_lora_training_client(base_model="tiny", rank=rank)
    before = loss_of(client)
    passes = [client.forward_backward([example(TEXT)], "cross_entropy") for _ in range(2)]
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert len(passes[0].result().loss_fn_outputs[0]["logprobs"].tolist()) == len(TEXT) - 1
    assert loss_of(client) < before
    assert client.get_info().lora_rank == rank


def test_a_batch_of_many_chunks_is_one_batch(sdk: tinker.ServiceClient) -> None:
    client = sdk.create_lora_training_client(base_model="tiny", rank=2)
    data = [example(TEXT[:3])] * 2500
    output = client.forward_backward(data, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 2500
    stepped = client.optim_step(types.AdamParams()).result()
    assert stepped.metrics is not None
    assert stepped.metrics["accumulated_passes"] == 3


def test_a_loss_computed_by_the_client_trains_too(sdk: tinker.ServiceClient) -> None:
    client = sdk.create_lora_training_client(base_model="tiny", rank=2)

    def loss(
        data: list[types.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        total = -sum(values.sum() for values in logprobs)
        assert isinstance(total, torch.Tensor)
        return total, {"seen": float(len(data))}

    before = loss_of(client)
    result = client.forward_backward_custom([example(TEXT)], loss).result()
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert result.metrics["seen"] == 1.0
    assert loss_of(client) < before


def test_a_saved_state_comes_back_whole_in_a_new_model(
    sdk: tinker.ServiceClient, trained: tinker.TrainingClient
) -> None:
    path = trained.save_state("whole").result().path
    again = sdk.create_training_client_from_state_with_optimizer(path)
    assert loss_of(again) == loss_of(trained)
    for client in (trained, again):
        client.forward_backward([example(TEXT)], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert loss_of(again) == loss_of(trained)


def test_sampling_sessions_are_snapshots(
    sdk: tinker.ServiceClient, trained: tinker.TrainingClient
) -> None:
    def sample(client: tinker.SamplingClient) -> list[int]:
        params = types.SamplingParams(max_tokens=12, seed=5)
        result = client.sample(types.ModelInput.from_ints(TEXT[:4]), 1, params).result()
        return list(result.sequences[0].tokens)

    old = trained.save_weights_and_get_sampling_client()
    before = sample(old)
    path = trained.save_weights_for_sampler("snapshot").result().path
    for _ in range(3):
        trained.forward_backward([example(TEXT)] * 4, "cross_entropy")
        trained.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    assert sample(old) == before
    assert sample(sdk.create_sampling_client(model_path=path)) == before
    new = trained.save_weights_and_get_sampling_client()
    assert sample(new) != before


def test_samples_without_a_seed_differ_from_each_other_and_repeat_in_a_rerun(
    service: ServiceProcess,
) -> None:
    def run() -> list[list[int]]:
        client = tinker.ServiceClient(base_url=service.url, api_key=service.key)
        sampler = client.create_sampling_client(base_model="tiny")
        prompt, params = types.ModelInput.from_ints(TEXT[:4]), types.SamplingParams(max_tokens=8)
        results = [sampler.sample(prompt, 3, params).result() for _ in range(2)]
        return [list(s.tokens) for result in results for s in result.sequences]

    first = run()
    assert len({tuple(tokens) for tokens in first}) == 6
    assert run() == first


def test_many_samples_with_much_to_answer_are_all_answered(sdk: tinker.ServiceClient) -> None:
    sampler = sdk.create_sampling_client(base_model="tiny")
    params = types.SamplingParams(max_tokens=200, seed=1)
    prompts = [types.ModelInput.from_ints([number, *TEXT]) for number in range(16)]
    futures = [sampler.sample(prompt, 16, params) for prompt in prompts]
    for future in futures:
        sequences = future.result(timeout=120).sequences
        assert len(sequences) == 16
        assert all(sequence.logprobs is not None for sequence in sequences)
        assert all(len(sequence.tokens) == len(sequence.logprobs or ()) for sequence in sequences)


def test_log_probs_of_prompt_and_sample_agree(sdk: tinker.ServiceClient) -> None:
    sampler = sdk.create_sampling_client(base_model="tiny")
    prompt = types.ModelInput.from_ints(TEXT[:6])
    params = types.SamplingParams(max_tokens=5, temperature=1.0, seed=1)
    result = sampler.sample(
        prompt,
        1,
        params,
        include_prompt_logprobs=True,
        topk_sample_logprobs=3,
        topk_prompt_logprobs=2,
    ).result()
    sequence = result.sequences[0]
    scored = sampler.compute_logprobs(
        types.ModelInput.from_ints(TEXT[:6] + list(sequence.tokens))
    ).result()
    assert sequence.logprobs is not None
    assert scored[6:] == pytest.approx(list(sequence.logprobs), abs=1e-4)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert scored[1:6] == pytest.approx(list(result.prompt_logprobs[1:]), abs=1e-4)


def test_targets_and_draws_of_a_prompt_are_scored(sdk: tinker.ServiceClient) -> None:
    sampler = sdk.create_sampling_client(base_model="tiny")
    tokens = TEXT[:6]
    prompt = types.ModelInput.from_ints(tokens)
    params = types.SamplingParams(max_tokens=3, temperature=1.0, seed=1)
    wanted = torch.tensor([[token, 7, -1] for token in tokens[1:]])
    plain = sampler.sample(prompt, 2, params, include_prompt_logprobs=True).result()
    for targets in (
        types.TensorData.from_torch(wanted),
        types.TensorData.from_torch_sparse(wanted, pad_value=-1),
    ):
        result = sampler.sample(
            prompt, 2, params, target_prompt_logprobs=targets, prompt_alt_tokens_k=4
        ).result()
        found = result.target_prompt_logprobs
        assert found is not None
        scores = found.to_torch()
        assert scores.shape == (5, 3)
        assert plain.prompt_logprobs is not None
        assert scores[:, 0].tolist() == pytest.approx(plain.prompt_logprobs[1:], abs=1e-4)
        assert scores[:, 2].tolist() == [0.0] * 5
        drawn = result.prompt_alt_tokens
        assert drawn is not None
        alternatives, logprobs = drawn.tokens.to_torch(), drawn.logprobs.to_torch()
        assert alternatives.shape == logprobs.shape == (5, 4)
        assert len(set(alternatives.flatten().tolist())) > 4
        again = types.TensorData.from_torch(alternatives.to(torch.int64))
        same = sampler.sample(prompt, 1, params, target_prompt_logprobs=again).result()
        assert same.target_prompt_logprobs is not None
        torch.testing.assert_close(
            same.target_prompt_logprobs.to_torch(), logprobs, atol=1e-4, rtol=0
        )
        assert [s.tokens for s in result.sequences] == [s.tokens for s in plain.sequences]
        assert result.prompt_logprobs is None


@pytest.mark.parametrize("loss", ["dro", "gspo"])
def test_further_losses_train(sdk: tinker.ServiceClient, loss: Any) -> None:
    client = sdk.create_lora_training_client(base_model="tiny", rank=2)
    before = client.forward([example(TEXT)], "cross_entropy").result()
    logprobs = before.loss_fn_outputs[0]["logprobs"].to_torch()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(TEXT[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor(TEXT[1:])),
            "logprobs": types.TensorData.from_torch(logprobs),
            "advantages": types.TensorData.from_torch(torch.ones(len(TEXT) - 1)),
        },
    )
    client.forward_backward([datum], loss).result()
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert loss_of(client) < before.metrics["loss:sum"]


def test_stop_strings_and_tokens_end_a_sample_and_are_part_of_it(sdk: tinker.ServiceClient) -> None:
    sampler = sdk.create_sampling_client(base_model="tiny")
    prompt = types.ModelInput.from_ints(TEXT[:4])
    free = types.SamplingParams(max_tokens=30, seed=9, stop=[])
    tokens = list(sampler.sample(prompt, 1, free).result().sequences[0].tokens)
    assert len(tokens) == 30
    place = next(n for n, token in enumerate(tokens) if token < 128 and n > 2)
    stops: list[list[int] | list[str]] = [[tokens[place]], [chr(tokens[place])]]
    for stop in stops:
        params = types.SamplingParams(max_tokens=30, seed=9, stop=stop)
        sequence = sampler.sample(prompt, 1, params).result().sequences[0]
        assert sequence.stop_reason == "stop"
        assert list(sequence.tokens) == tokens[: tokens.index(tokens[place]) + 1]


def test_what_there_is_can_be_listed_shared_and_deleted(
    sdk: tinker.ServiceClient, trained: tinker.TrainingClient, service: ServiceProcess
) -> None:
    rest = tinker.RestClient(base_url=service.url, api_key=service.key)
    path = trained.save_state("listed").result().path
    run = rest.get_training_run(trained.model_id).result()
    assert run.base_model == "tiny"
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == path
    held = rest.list_checkpoints(trained.model_id).result().checkpoints
    assert path in [item.tinker_path for item in held]
    other = tinker.ServiceClient(base_url=service.url, api_key=service.key_of("other"))
    with pytest.raises(tinker.NotFoundError):
        other.create_training_client_from_state(path)
    rest.publish_checkpoint_from_tinker_path(path).result()
    assert loss_of(other.create_training_client_from_state(path)) == loss_of(trained)
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        rest.get_weights_info_by_tinker_path(path).result()


# ---- openai ----
@pytest.fixture(scope="module")
def client(service: ServiceProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0)


def test_completions_are_the_same_streamed_or_not_from_text_or_tokens(
    client: openai.OpenAI,
) -> None:
    prompt = "the tide"
    more = {"return_token_ids": True, "ignore_eos": True}
    whole = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=12, seed=3, extra_body=more
    )
    choice = whole.choices[0]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(prompt)
    assert choice.finish_reason == "length"
    assert choice.model_extra is not None
    assert len(choice.model_extra["token_ids"]) == whole.usage.completion_tokens == 12
    tokens = client.completions.create(
        model="tiny", prompt=list(prompt.encode()), max_tokens=12, seed=3, extra_body=more
    )
    assert tokens.choices[0].text == choice.text
    stream = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=12, seed=3, stream=True, extra_body=more
    )
    assert "".join(c.text for chunk in stream for c in chunk.choices) == choice.text


def test_chat_streams_choices_with_usage_and_log_probs(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 6,
        "seed": 1,
        "n": 2,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    assert len(whole.choices) == 2
    assert len(whole.choices[0].logprobs.content) == 6
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    texts, usage = ["", ""], None
    for chunk in client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert usage is not None
    assert usage.completion_tokens == 12


def test_a_stop_string_ends_the_text_and_is_not_in_it(client: openai.OpenAI) -> None:
    more = {"ignore_eos": True}
    free = client.completions.create(
        model="tiny", prompt="abc", max_tokens=40, seed=2, extra_body=more
    )
    letter = next(c for c in free.choices[0].text[3:] if c.isascii() and c.isprintable())
    cut = client.completions.create(
        model="tiny", prompt="abc", max_tokens=40, seed=2, stop=letter, extra_body=more
    )
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == free.choices[0].text.split(letter)[0]


def test_errors_are_the_clients_own_types(client: openai.OpenAI, service: ServiceProcess) -> None:
    with pytest.raises(openai.NotFoundError, match="there are: tiny"):
        client.completions.create(model="missing", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="must be below 1024"):
        client.completions.create(model="tiny", prompt="x" * 2000)
    with pytest.raises(openai.BadRequestError, match="functions"):
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            functions=[{"name": "f"}],
        )
    stranger = openai.OpenAI(base_url=f"{service.url}/v1", api_key="no", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_trained_weights_answer_under_their_path(
    client: openai.OpenAI, trained: tinker.TrainingClient
) -> None:
    path = trained.save_weights_for_sampler("served").result().path
    assert path in [model.id for model in client.models.list()]
    ask: dict[str, Any] = {"prompt": "the ", "max_tokens": 20, "temperature": 0.0}
    base = client.completions.create(model="tiny", **ask)
    tuned = client.completions.create(model=path, **ask)
    assert tuned.choices[0].text != base.choices[0].text


def test_a_client_that_leaves_is_not_worked_for(service: ServiceProcess) -> None:
    async def leave() -> None:
        client = openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key=service.key)
        stream = await client.completions.create(
            model="tiny", prompt="abc", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        await stream.close()
        await client.close()

    before = service.status()["gauges"]["rollout_cancelled_turns"]
    asyncio.run(leave())

    def cancelled() -> bool:
        return service.status()["gauges"]["rollout_cancelled_turns"] > before

    wait_for("the cancellation", cancelled)


def test_status_metrics_and_a_second_start_say_what_runs(service: ServiceProcess) -> None:
    command = [sys.executable, "-m", "slackwater"]
    state = ["--state", str(service.state)]
    status = subprocess.run(
        [*command, "status", "--json", *state], capture_output=True, text=True, check=True
    )
    found = json.loads(status.stdout)
    assert found["running"] is True
    assert found["gauges"]["engines"] == 1
    second = subprocess.run([*command, "up", *state], capture_output=True, text=True)
    assert second.returncode == 1
    assert "slackwater down" in second.stderr
    metrics = service.get("/metrics").text
    assert "slackwater_rollout_completed_turns" in metrics
    assert 'slackwater_worker{gauge="running"' in metrics


def test_the_suite_leaves_no_client_that_still_sends_heartbeats(service: ServiceProcess) -> None:
    with sdk_clients_closed():
        client = tinker.ServiceClient(base_url=service.url, api_key=service.key)
        heartbeat = client.holder._session_heartbeat_task
        assert heartbeat is not None
        assert not heartbeat.done()
    wait_for("the heartbeats' end", heartbeat.done)
