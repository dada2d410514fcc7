"""A trainer's operations: whole or not at all, and the same again from the same state."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_builders import NET, batch, datum, state_bytes, trainer

from slackwater.model.adam import Adam
from slackwater.model.errors import ConfigError, NotFoundError, RefusedError
from slackwater.nets.loading import load_net, save_net
from slackwater.nets.lora import LoraSpec
from slackwater.tensors.checked_file import write_tensors
from slackwater.training import logprobs
from slackwater.training.datum import Datum
from slackwater.training.packed_pass import MicroBatch
from slackwater.training.parameters import base_sum
from slackwater.training.state_file import read_state
from slackwater.training.trainer import Trainer

LORA = LoraSpec(rank=4, seed=2)
ADAM = Adam(learning_rate=1e-2, grad_clip_norm=1.0)


def with_input(item: Datum, name: str, value: np.ndarray) -> Datum:
    return Datum(item.tokens, {**item.inputs, name: value})


def saved(subject: Trainer, folder: Path) -> bytes:
    subject.save(folder)
    return state_bytes(folder)


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replaying_the_same_operations_over_a_save_ends_in_the_same_bits(
    tmp_path: Path, lora: LoraSpec | None, dtype: str
) -> None:
    first = trainer(lora, dtype)
    first.forward_backward(batch(1), "cross_entropy", {})
    first.optim_step(ADAM)
    first.forward_backward(batch(2), "ppo", {})  # saved with a pass accumulated
    first.save(tmp_path / "middle")
    second = Trainer.load(tmp_path / "middle")
    for subject in (first, second):
        subject.forward_backward(batch(3), "importance_sampling", {})
        subject.optim_step(ADAM)
        subject.forward_backward(batch(4), "cispo", {})
        subject.optim_step(ADAM)
    assert saved(first, tmp_path / "a") == saved(second, tmp_path / "b")


def test_training_lowers_the_loss_in_full_and_with_an_adapter() -> None:
    data = [with_input(d, "weights", np.ones(d.num_tokens, np.float32)) for d in batch()]
    for subject in (trainer(), trainer(LORA), trainer(LORA, "bfloat16")):
        losses = []
        for _ in range(15):
            losses.append(subject.forward_backward(data, "cross_entropy", {}).metrics["loss:sum"])
            subject.optim_step(ADAM)
        assert losses[-1] < 0.8 * losses[0]


def test_an_adapter_trains_over_a_base_that_stays_as_it_is() -> None:
    subject = trainer(LORA)
    base = {name: tensor.clone() for name, tensor in subject._net.named_parameters()}
    subject.forward_backward(batch(), "cross_entropy", {})
    subject.optim_step(ADAM)
    assert all("lora_" in name for name in subject.weights())
    for name, tensor in subject._net.named_parameters():
        assert torch.equal(tensor, base[name])


def test_passes_add_up_until_the_step_and_the_step_clears_them() -> None:
    split, whole = trainer(), trainer()
    data = batch()
    split.forward_backward(data[:2], "cross_entropy", {})
    split.forward_backward(data[2:], "cross_entropy", {})
    whole.forward_backward(data, "cross_entropy", {})
    for name, gradient in whole.gradient().items():
        torch.testing.assert_close(split.gradient()[name], gradient, rtol=1e-4, atol=1e-5)
    assert split.optim_step(ADAM)["accumulated_passes"] == 2
    assert not any(gradient.any() for gradient in split.gradient().values())


def test_a_step_with_no_pass_before_it_changes_nothing(tmp_path: Path) -> None:
    subject = trainer()
    subject.forward_backward(batch(), "cross_entropy", {})
    subject.optim_step(ADAM)
    before = saved(subject, tmp_path / "a")
    assert subject.optim_step(ADAM)["accumulated_passes"] == 0
    assert saved(subject, tmp_path / "b") == before


def test_a_forward_pass_changes_nothing_and_says_the_same(tmp_path: Path) -> None:
    subject = trainer()
    before = saved(subject, tmp_path / "a")
    looked = subject.forward_backward(batch(), "ppo", {}, forward_only=True)
    assert saved(subject, tmp_path / "b") == before
    trained = subject.forward_backward(batch(), "ppo", {})
    assert looked.metrics == trained.metrics
    for one, other in zip(looked.logprobs, trained.logprobs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("recompute", [False, True])
def test_micro_batches_logit_chunks_and_recomputing_do_not_change_what_is_learnt(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trainer()
    whole.forward_backward(batch(), "ppo", {})
    monkeypatch.setattr(logprobs, "LOGITS_BUDGET", {"cpu": 16 * NET.vocab_size})
    pieces = trainer()
    pieces._pass._micro_batch = MicroBatch(tokens=20, keys_per_token=100, recompute=recompute)
    pieces.forward_backward(batch(), "ppo", {})
    for name, gradient in whole.gradient().items():
        torch.testing.assert_close(pieces.gradient()[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "scale"), [("cross_entropy", "weights"), ("importance_sampling", "advantages")]
)
def test_data_without_a_gradient_are_scored_and_get_no_backward_pass(
    loss: str, scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mute = [with_input(d, scale, np.zeros(d.num_tokens, np.float32)) for d in batch(7)]
    alone, mixed = trainer(), trainer()
    alone.forward_backward(batch(), loss, {})
    output = mixed.forward_backward([*mute[:3], *batch(), *mute[3:]], loss, {})
    assert any(gradient.any() for gradient in alone.gradient().values())
    for name, gradient in alone.gradient().items():
        torch.testing.assert_close(mixed.gradient()[name], gradient, rtol=1e-5, atol=1e-6)
    backwards: list[torch.Tensor] = []
    monkeypatch.setattr(torch.autograd, "backward", backwards.append)
    scored = trainer().forward_backward(mute, loss, {})
    assert not backwards
    both = zip(scored.logprobs, [*output.logprobs[:3], *output.logprobs[-3:]], strict=True)
    for found, expected in both:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


BAD: list[tuple[str, Callable[[Datum], Datum]]] = [
    (
        r"data\[1\].advantages\[2\]: nan",
        lambda d: with_input(d, "advantages", np.array([0, 0, np.nan, 0], np.float32)),
    ),
    (
        r"data\[1\].logprobs\[0\]: -inf",
        lambda d: with_input(d, "logprobs", np.array([-np.inf, 0, 0, 0], np.float32)),
    ),
    (
        r"data\[1\].advantages: 'float64' must be float32",
        lambda d: with_input(d, "advantages", np.zeros(4)),
    ),
    (
        r"data\[1\].advantages: \(3,\) must have",
        lambda d: with_input(d, "advantages", np.zeros(3, np.float32)),
    ),
    (
        r"data\[1\].target_tokens: 61 must be a token from 0 to 60",
        lambda d: with_input(d, "target_tokens", np.full(4, 61)),
    ),
    (
        r"data\[1\].target_tokens: 'int32'",
        lambda d: with_input(d, "target_tokens", np.zeros(4, np.int32)),
    ),
    (
        r"data\[1\].target_tokens: \(5,\)",
        lambda d: with_input(d, "target_tokens", np.zeros(5, np.int64)),
    ),
    (
        r"data\[1\].target_tokens: \(4, 2\)",
        lambda d: with_input(d, "target_tokens", np.zeros((4, 2), np.int64)),
    ),
    (r"data\[1\].tokens: -1", lambda d: Datum(np.array([0, -1, 0, 0]), d.inputs)),
    (
        r"data\[1\].tokens: \(0,\) must be a list of 1 to 64",
        lambda d: Datum(np.zeros(0, np.int64), d.inputs),
    ),
    (r"data\[1\].tokens: \(65,\)", lambda d: Datum(np.zeros(65, np.int64), d.inputs)),
    (
        r"must also hold advantages",
        lambda d: Datum(d.tokens, {k: v for k, v in d.inputs.items() if k != "advantages"}),
    ),
]


@pytest.mark.parametrize(("message", "spoil"), BAD, ids=[message for message, _ in BAD])
def test_bad_data_is_refused_by_name_before_any_state_changes(
    tmp_path: Path, message: str, spoil: Callable[[Datum], Datum]
) -> None:
    subject = trainer()
    subject.forward_backward(batch(), "ppo", {})
    before = saved(subject, tmp_path / "a")
    with pytest.raises(ConfigError, match=message):
        subject.forward_backward([datum(0, 6), spoil(datum(1, 4))], "ppo", {})
    assert saved(subject, tmp_path / "b") == before


@pytest.mark.parametrize(
    ("loss_fn", "config", "message"),
    [
        ("nonesuch", {}, "loss_fn: 'nonesuch' is not implemented"),
        ("ppo", {"clip_low": 0.1}, "loss_fn_config.clip_low: 0.1 is no setting of ppo"),
        ("ppo", {"clip_low_threshold": 2.0}, "clip_low_threshold: 2.0 must be"),
        ("ppo", {"clip_high_threshold": float("nan")}, "must be a finite number"),
    ],
)
def test_an_unknown_loss_or_setting_is_refused(
    loss_fn: str, config: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer().forward_backward(batch(), loss_fn, config)


def test_no_data_and_bad_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one datum"):
        trainer().forward_backward([], "ppo", {})
    with pytest.raises(ConfigError, match="learning_rate: nan"):
        trainer().optim_step(Adam(learning_rate=float("nan")))
    with pytest.raises(ConfigError, match=r"beta2: 1.0 must be below 1"):
        trainer().optim_step(Adam(beta2=1.0))


def test_a_pass_that_overflows_in_its_last_micro_batch_gives_its_gradient_back(
    tmp_path: Path,
) -> None:
    subject = trainer()
    subject._pass._micro_batch = MicroBatch(tokens=20, keys_per_token=100, recompute=False)
    subject.forward_backward(batch(), "ppo", {})
    before = saved(subject, tmp_path / "a")
    absurd = with_input(datum(0, 4), "logprobs", np.full(4, -1e4, np.float32))
    with pytest.raises(RefusedError, match="not finite"):
        subject.forward_backward([*batch(), absurd], "importance_sampling", {})
    assert saved(subject, tmp_path / "b") == before


def test_weights_alone_can_be_loaded_and_the_optimizer_starts_anew(tmp_path: Path) -> None:
    first = trainer(LORA)
    first.forward_backward(batch(), "cross_entropy", {})
    first.optim_step(ADAM)
    first.save(tmp_path)
    second = trainer(LoraSpec(rank=4, seed=9))
    second.load_into(tmp_path, optimizer=False)
    for name, weight in first.weights().items():
        assert torch.equal(second.weights()[name], weight)
    assert second.meta.optimizer_steps == 0
    second.load_into(tmp_path, optimizer=True)
    assert second.meta.optimizer_steps == 1


def test_a_state_of_another_net_base_or_rank_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    full, adapter = trainer(), trainer(LORA)
    full.save(tmp_path / "full")
    adapter.save(tmp_path / "adapter")
    before = saved(full, tmp_path / "a")
    with pytest.raises(ConfigError, match="lora"):
        full.load_into(tmp_path / "adapter", optimizer=True)
    with pytest.raises(ConfigError, match="lora"):
        trainer(LoraSpec(rank=2)).load_into(tmp_path / "adapter", optimizer=True)
    other_base = Trainer.create(NET, LORA, seed=4)
    with pytest.raises(ConfigError, match="another base"):
        other_base.load_into(tmp_path / "adapter", optimizer=True)
    with pytest.raises(NotFoundError, match="holds no"):
        full.load_into(tmp_path / "nowhere", optimizer=True)
    assert saved(full, tmp_path / "b") == before


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    trainer().save(tmp_path)
    altered = bytearray(state_bytes(tmp_path))
    altered[-7] ^= 4
    (tmp_path / "trainer.safetensors").write_bytes(altered)
    with pytest.raises(ConfigError, match="not as written"):
        Trainer.load(tmp_path)


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize(("wrote", "reads"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_state_moves_between_types_with_nothing_lost_and_says_its_own(
    tmp_path: Path, lora: LoraSpec | None, wrote: str, reads: str
) -> None:
    save_net(load_net(NET, seed=3), tmp_path / "base")
    first = Trainer.create(tmp_path / "base", lora, seed=3, dtype=wrote)
    first.forward_backward(batch(1), "cross_entropy", {})
    first.optim_step(ADAM)
    first.forward_backward(batch(2), "ppo", {})
    first.save(tmp_path / "state")
    assert read_state(tmp_path / "state").meta.dtype == wrote
    there = Trainer.load(tmp_path / "state", dtype=reads)
    there.save(tmp_path / "moved")
    assert read_state(tmp_path / "moved").meta.dtype == reads
    back = Trainer.load(tmp_path / "moved", dtype=wrote)
    assert saved(back, tmp_path / "back") == state_bytes(tmp_path / "state")
    into = Trainer.create(tmp_path / "base", lora, seed=3, dtype=reads)
    into.load_into(tmp_path / "state", optimizer=True)
    assert saved(into, tmp_path / "into") == state_bytes(tmp_path / "moved")


def test_a_bf16_net_computes_in_bf16_and_keeps_masters_and_moments_in_fp32(tmp_path: Path) -> None:
    subject = trainer(None, "bfloat16")
    start = {
        name: tensor.clone()
        for name, tensor in subject.flat.views_by_name(subject.flat.master).items()
    }
    for seed in range(4):
        subject.forward_backward(batch(seed), "cross_entropy", {})
        subject.optim_step(Adam(learning_rate=1e-6))  # too small for bf16 to show at once
    assert all(tensor.dtype == torch.bfloat16 for tensor in subject.weights().values())
    subject.save(tmp_path)
    kept = read_state(tmp_path).tensors
    assert {t.dtype for part in kept.values() for t in part.values()} == {torch.float32}
    moved = [
        name for name, tensor in kept["weight"].items() if not torch.equal(tensor, start[name])
    ]
    assert len(moved) == len(start)


def test_the_sum_of_a_base_sees_every_weight_and_not_the_type() -> None:
    tensors = {"a": torch.randn(7, 5), "b": torch.randn(9)}
    tensors = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    whole = base_sum(tensors)
    assert base_sum({name: tensor.bfloat16() for name, tensor in tensors.items()}) == whole
    for name, place in (("a", (6, 4)), ("a", (0, 0)), ("b", (8,))):
        other = {key: tensor.clone() for key, tensor in tensors.items()}
        other[name][place] += 1
        assert base_sum(other) != whole
    swapped = {**tensors, "b": tensors["b"].flip(0)}
    assert base_sum(swapped) != whole


def test_a_state_of_the_first_kind_is_still_read(tmp_path: Path) -> None:
    first = trainer(LORA)
    first.save(tmp_path)
    state = read_state(tmp_path)
    flat = {f"{part}.{n}": t for part, named in state.tensors.items() for n, t in named.items()}
    meta = state.meta.to_json() | {"kind": "slackwater trainer state 1", "base_crc32": 7}
    del meta["base_sum"]
    write_tensors(tmp_path / "old" / "trainer.safetensors", flat, meta)
    again = Trainer.load(tmp_path / "old")
    assert again.meta == first.meta
