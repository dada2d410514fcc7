"""Losses and gradients against a plain reference: transformers' forward, one sequence at a time,
and the formulas written out with torch.log_softmax and autograd.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers
from trainer_builders import NET, batch, datum, trainer

from slackwater.nets.lora import LoraSpec
from slackwater.training.datum import Datum
from slackwater.training.trainer import Trainer


def reference_model(subject: Trainer) -> torch.nn.Module:
    config = transformers.Qwen3Config(**NET.to_hf())
    model: torch.nn.Module = transformers.Qwen3ForCausalLM(config).float().eval()
    model.load_state_dict(dict(subject.weights()), strict=False)
    return model


def reference_logprobs(model: torch.nn.Module, item: Datum) -> torch.Tensor:
    logits = model(torch.from_numpy(item.tokens)[None]).logits[0]
    targets = torch.from_numpy(item.inputs["target_tokens"])
    every = torch.log_softmax(logits, dim=-1)
    if targets.ndim == 1:
        return every[torch.arange(len(targets)), targets]
    return torch.stack([row[picked] for row, picked in zip(every, targets, strict=True)])


def cross_entropy(lp: torch.Tensor, item: dict[str, torch.Tensor]) -> torch.Tensor:
    return (lp * item["weights"]).sum().neg()


def importance_sampling(lp: torch.Tensor, item: dict[str, torch.Tensor]) -> torch.Tensor:
    return -((lp - item["logprobs"]).exp() * item["advantages"]).sum()


def ppo(lp: torch.Tensor, item: dict[str, torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(())
    for new, old, advantage in zip(lp, item["logprobs"], item["advantages"], strict=True):
        ratio = torch.exp(new - old)
        capped = torch.clip(ratio, 0.8, 1.2)
        total = total - torch.min(ratio * advantage, capped * advantage)
    return total


def cispo(lp: torch.Tensor, item: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        capped = torch.clip(torch.exp(lp - item["logprobs"]), 0.0, 4.0)
    return -(capped * lp * item["advantages"]).sum()


def dro(lp: torch.Tensor, item: dict[str, torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(())
    for new, old, advantage in zip(lp, item["logprobs"], item["advantages"], strict=True):
        of_prompt = float(old) == 0 and float(advantage) == 0
        total = total - new * advantage + (0 if of_prompt else 0.5 * 0.05 * (new - old) ** 2)
    return total


def gspo(lp: torch.Tensor, item: dict[str, torch.Tensor]) -> torch.Tensor:
    kept = [place for place, advantage in enumerate(item["advantages"]) if float(advantage) != 0]
    if not kept:
        return lp.sum() * 0
    ratio = torch.exp(torch.stack([lp[place] - item["logprobs"][place] for place in kept]).mean())
    capped = torch.clip(ratio, 1 - 3e-4, 1 + 4e-4)
    values = [
        torch.min(ratio * item["advantages"][p], capped * item["advantages"][p]) for p in kept
    ]
    return -torch.stack(values).mean()


REFERENCES: dict[str, Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}


@pytest.mark.parametrize("name", REFERENCES)
def test_logprobs_loss_and_gradient_are_those_of_the_plain_formula(name: str) -> None:
    subject, data = trainer(), batch()
    output = subject.forward_backward(data, name, {})
    model, total = reference_model(subject), torch.zeros(())
    for item, seen in zip(data, output.logprobs, strict=True):
        lp = reference_logprobs(model, item)
        np.testing.assert_allclose(seen, lp.detach().numpy(), atol=2e-5)
        inputs = {key: torch.from_numpy(value) for key, value in item.inputs.items()}
        total = total + REFERENCES[name](lp, inputs)
    total.backward()
    assert output.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4, abs=1e-4)
    compare_gradients(subject, model)


def test_a_quadratic_pull_leaves_the_prompt_alone() -> None:
    subject, (item, *_) = trainer(), batch()
    idle = {name: np.zeros_like(item.inputs[name]) for name in ("logprobs", "advantages")}
    prompt_only = Datum(item.tokens, {**item.inputs, **idle})
    assert subject.forward_backward([prompt_only], "dro", {}).metrics["loss:sum"] == 0
    assert all(not gradient.any() for gradient in subject.gradient().values())


def test_rows_of_several_targets_are_summed_over() -> None:
    subject, data = trainer(), [datum(1, 7, 3), datum(2, 4, 5), datum(3, 6)]
    output = subject.forward_backward(data, "cross_entropy", {})
    model, total = reference_model(subject), torch.zeros(())
    for item, seen in zip(data, output.logprobs, strict=True):
        lp = reference_logprobs(model, item)
        assert seen.shape == item.inputs["target_tokens"].shape
        np.testing.assert_allclose(seen, lp.detach().numpy(), atol=2e-5)
        total = total - (lp * torch.from_numpy(item.inputs["weights"])).sum()
    total.backward()
    compare_gradients(subject, model)


def compare_gradients(subject: Trainer, model: torch.nn.Module) -> None:
    ours = subject.gradient()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert theirs[name] is not None, name
        torch.testing.assert_close(gradient, theirs[name], rtol=2e-3, atol=2e-4, msg=name)


def test_a_loss_computed_by_the_caller_works_through_cross_entropy_weights() -> None:
    subject, data = trainer(), batch()
    weightless = [
        Datum(d.tokens, {**d.inputs, "weights": np.zeros_like(d.inputs["weights"])}) for d in data
    ]
    first = subject.forward_backward(weightless, "cross_entropy", {}, forward_only=True)
    logprobs = [torch.from_numpy(lp.copy()).requires_grad_() for lp in first.logprobs]
    torch.cat([lp.exp() ** 2 for lp in logprobs]).sum().backward()
    linear = [
        Datum(d.tokens, {**d.inputs, "weights": -lp.grad.numpy()})  # type: ignore[union-attr]
        for d, lp in zip(data, logprobs, strict=True)
    ]
    subject.forward_backward(linear, "cross_entropy", {})
    model = reference_model(subject)
    torch.stack([(reference_logprobs(model, d).exp() ** 2).sum() for d in data]).sum().backward()
    compare_gradients(subject, model)


def test_adamw_with_clipping_is_that_of_pytorch() -> None:
    from slackwater.model.adam import Adam

    subject, data = trainer(), batch()
    model = reference_model(subject)
    params = Adam(1e-2, 0.8, 0.9, 1e-6, 0.1, grad_clip_norm=0.5)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1
    )
    for _ in range(3):
        subject.forward_backward(data, "cross_entropy", {})
        named = dict(model.named_parameters())
        for name, gradient in subject.gradient().items():
            named[name].grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        metrics = subject.optim_step(params)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        for name, weight in subject.weights().items():
            torch.testing.assert_close(weight, named[name].data, rtol=1e-4, atol=1e-6)


def test_an_adapters_gradient_is_that_of_the_merged_weight_through_its_factors() -> None:
    spec = LoraSpec(rank=2, alpha=8, seed=1)
    subject, full, data = trainer(spec), trainer(), batch()
    subject.forward_backward(data, "cross_entropy", {})
    full.forward_backward(data, "cross_entropy", {})
    ours, whole, factors = subject.gradient(), full.gradient(), subject.weights()
    for name in factors:
        if not name.endswith("lora_B.weight") or "lm_head" in name:
            continue
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
        first = factors[name.replace("lora_B", "lora_A")]
        expected = spec.scale * whole[f"{layer}.weight"] @ first.T
        torch.testing.assert_close(ours[name], expected, rtol=2e-3, atol=2e-4)
