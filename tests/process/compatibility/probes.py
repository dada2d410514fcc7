"""One real call for every public method of the installed `tinker` SDK.

A probe returns when the method did its work against the service, and raises when it did not.
Methods without a probe fail the test: a new SDK release shows up here by name.
"""

import asyncio
import base64
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tinker
import torch
from tinker import types
from tinker.lib.api_future_impl import QueueState

CLASSES = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    tinker.RestClient,
    tinker.AdminClient,
    tinker.APIFuture,
)
PROMPT = types.ModelInput.from_ints([5, 6, 7, 8])
PARAMS = types.SamplingParams(max_tokens=3, temperature=1.0, seed=1)


def public_methods() -> list[str]:
    """`Class.method` for all that a user of the SDK can call."""
    return [
        f"{cls.__name__}.{name}"
        for cls in CLASSES
        for name, member in inspect.getmembers(cls)
        if not name.startswith("_") and callable(member)
    ]


def datum() -> types.Datum:
    return types.Datum(
        model_input=PROMPT,
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor([6, 7, 8, 9])),
            "weights": types.TensorData.from_torch(torch.ones(4)),
        },
    )


def scaled_logprobs(
    data: list[types.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    del data
    loss = -2.0 * torch.stack([lp.sum() for lp in logprobs]).sum()
    return loss, {"seen": float(len(logprobs))}


def per_datum_loss(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -logprobs.sum()
    return loss, {"custom/seen:sum": loss}


@dataclass
class Bench:
    """What probes share: one service, one model in training, one sampler, one checkpoint."""

    base_model: str
    service: tinker.ServiceClient
    training: tinker.TrainingClient
    sampling: tinker.SamplingClient
    rest: tinker.RestClient
    admin: tinker.AdminClient
    state_path: str
    sampler_path: str
    base_url: str
    api_key: str
    session_id: str
    _names: int = field(default=0)

    @classmethod
    def over(cls, base_url: str, api_key: str, base_model: str) -> "Bench":
        service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
        training = service.create_lora_training_client(base_model, rank=4, seed=1)
        state_path = training.save_state("first").result().path
        sampler_path = training.save_weights_for_sampler("first").result().path
        rest = service.create_rest_client()
        return cls(
            base_model=base_model,
            service=service,
            training=training,
            sampling=service.create_sampling_client(model_path=sampler_path),
            rest=rest,
            admin=tinker.AdminClient(base_url=base_url, api_key=api_key),
            state_path=state_path,
            sampler_path=sampler_path,
            base_url=base_url,
            api_key=api_key,
            session_id=rest.list_sessions().result().sessions[0],
        )

    def name(self) -> str:
        self._names += 1
        return f"probe-{self._names}"

    @property
    def run_id(self) -> str:
        return types.ParsedCheckpointTinkerPath.from_tinker_path(self.state_path).training_run_id

    def with_project(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(
            base_url=self.base_url, api_key=self.api_key, project_id="project-1"
        )

    def spare_checkpoint(self) -> str:
        return str(self.training.save_state(self.name()).result().path)


@dataclass(frozen=True)
class Call:
    """A method's owner and arguments; the async twin of a method is called with the same."""

    owner: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self, method: str) -> Any:
        """Call it, and wait for the end of whatever it gives: a future, an awaitable, or the thing
        itself.
        """
        if method.endswith("_async"):
            return asyncio.run(asyncio.wait_for(self._awaited(method), 60))
        value = getattr(self.owner, method)(*self.arguments, **self.options)
        while callable(getattr(value, "result", None)):
            value = value.result(timeout=60)
        return value

    async def _awaited(self, method: str) -> Any:
        value = await getattr(self.owner, method)(*self.arguments, **self.options)
        return await value.result_async() if hasattr(value, "result_async") else value


def sampler_id(sampling: tinker.SamplingClient) -> str:
    """The sampling session's id, out of the handle that the SDK gives to other processes."""
    handle = sampling.get_sampler_handle()
    padded = handle + "=" * (-len(handle) % 4)
    return str(json.loads(base64.urlsafe_b64decode(padded))["sampling_session_id"])


def on(owner: Any, *arguments: Any, **options: Any) -> Call:
    return Call(owner, arguments, options)


def probes(b: Bench) -> dict[str, Callable[[], Call]]:
    """How to call each method, made when its turn comes."""
    checkpoint = types.ParsedCheckpointTinkerPath.from_tinker_path
    adam = types.AdamParams(learning_rate=1e-4)
    service, training, sampling, rest, admin = b.service, b.training, b.sampling, b.rest, b.admin
    window = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z")
    return {
        "ServiceClient.copy_weights": lambda: on(b.with_project(), b.state_path),
        "ServiceClient.create_custom_loss": lambda: on(service, per_datum_loss, {"logprobs": 1}),
        "ServiceClient.create_lora_training_client": lambda: on(service, b.base_model, rank=2),
        "ServiceClient.create_rest_client": lambda: on(service),
        "ServiceClient.create_sampling_client": lambda: on(service, base_model=b.base_model),
        "ServiceClient.create_training_client_from_state": lambda: on(service, b.state_path),
        "ServiceClient.create_training_client_from_state_with_optimizer": lambda: on(
            service, b.state_path
        ),
        "ServiceClient.get_console_url": lambda: on(service),
        "ServiceClient.get_server_capabilities": lambda: on(service),
        "ServiceClient.get_telemetry": lambda: on(service),
        "TrainingClient.create_sampling_client": lambda: on(training, b.sampler_path),
        "TrainingClient.forward": lambda: on(training, [datum()], "cross_entropy"),
        "TrainingClient.forward_backward": lambda: on(training, [datum()], "cross_entropy"),
        "TrainingClient.forward_backward_custom": lambda: on(training, [datum()], scaled_logprobs),
        "TrainingClient.get_console_url": lambda: on(training),
        "TrainingClient.get_info": lambda: on(training),
        "TrainingClient.get_telemetry": lambda: on(training),
        "TrainingClient.get_tokenizer": lambda: on(training),
        "TrainingClient.load_state": lambda: on(training, b.state_path),
        "TrainingClient.load_state_with_optimizer": lambda: on(training, b.state_path),
        "TrainingClient.optim_step": lambda: on(training, adam),
        "TrainingClient.save_state": lambda: on(training, b.name()),
        "TrainingClient.save_weights_and_get_sampling_client": lambda: on(training),
        "TrainingClient.save_weights_external": lambda: on(training, b.name()),
        "TrainingClient.save_weights_for_sampler": lambda: on(training, b.name()),
        "SamplingClient.compute_logprobs": lambda: on(sampling, PROMPT),
        "SamplingClient.create": lambda: on(
            tinker.SamplingClient, service.holder, base_model=b.base_model
        ),
        "SamplingClient.from_sampler_handle": lambda: on(
            tinker.SamplingClient, sampling.get_sampler_handle(), api_key=b.api_key
        ),
        "SamplingClient.get_base_model": lambda: on(sampling),
        "SamplingClient.get_sampler_handle": lambda: on(sampling),
        "SamplingClient.get_telemetry": lambda: on(sampling),
        "SamplingClient.get_tokenizer": lambda: on(sampling),
        "SamplingClient.sample": lambda: on(
            sampling,
            PROMPT,
            2,
            PARAMS,
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=2,
        ),
        "RestClient.assign_session_project": lambda: on(rest, b.session_id, "project-1"),
        "RestClient.copy_weights": lambda: on(rest, b.state_path, "project-1"),
        "RestClient.delete_checkpoint": lambda: on(
            rest, b.run_id, checkpoint(b.spare_checkpoint()).checkpoint_id
        ),
        "RestClient.delete_checkpoint_from_tinker_path": lambda: on(rest, b.spare_checkpoint()),
        "RestClient.export_session_trace": lambda: on(rest, b.session_id),
        "RestClient.get_audit_log": lambda: on(rest),
        "RestClient.get_billing_usage": lambda: on(rest, *window),
        "RestClient.get_current_checkpoint_storage_usage": lambda: on(rest),
        "RestClient.get_external_weights_urls": lambda: on(
            rest, training.save_weights_external(b.name()).result().path
        ),
        "RestClient.get_sampler": lambda: on(rest, sampler_id(sampling)),
        "RestClient.get_session": lambda: on(rest, b.session_id),
        "RestClient.get_telemetry": lambda: on(rest),
        "RestClient.get_training_run": lambda: on(rest, b.run_id),
        "RestClient.get_training_run_by_tinker_path": lambda: on(rest, b.state_path),
        "RestClient.get_weights_info_by_tinker_path": lambda: on(rest, b.state_path),
        "RestClient.list_checkpoints": lambda: on(rest, b.run_id),
        "RestClient.list_sessions": lambda: on(rest),
        "RestClient.list_training_runs": lambda: on(rest),
        "RestClient.list_user_checkpoints": lambda: on(rest),
        "RestClient.publish_checkpoint_from_tinker_path": lambda: on(rest, b.state_path),
        "RestClient.search_sessions": lambda: on(rest, types.SessionSearchRequest()),
        "RestClient.set_checkpoint_ttl_from_tinker_path": lambda: on(rest, b.state_path, 7200),
        "RestClient.unpublish_checkpoint_from_tinker_path": lambda: on(rest, b.state_path),
        "RestClient.whoami": lambda: on(rest),
        "AdminClient.get_audit_log": lambda: on(admin),
        "AdminClient.get_billing_usage": lambda: on(admin, *window),
        "AdminClient.get_current_checkpoint_storage_usage": lambda: on(admin),
        "AdminClient.get_telemetry": lambda: on(admin),
        "APIFuture.result": lambda: on(training.forward([datum()], "cross_entropy")),
        "SamplingClient.on_queue_state_change": lambda: on(sampling, QueueState.ACTIVE, None),
        "ServiceClient.close": lambda: on(
            tinker.ServiceClient(base_url=b.base_url, api_key=b.api_key), "success"
        ),
    }
