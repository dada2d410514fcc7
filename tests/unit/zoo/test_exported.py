"""Weights that leave: transformers, peft and the cookbook compute our log-probs from what we
export.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from slackwater.engine.config import EngineConfig
from slackwater.engine.engine import Engine
from slackwater.engine.request import GenerationRequest
from slackwater.model.errors import ConfigError
from slackwater.model.ids import ModelId, TenantId
from slackwater.model.sampling import Sampling
from slackwater.model.session import LoraShape
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net, net_tensors
from slackwater.nets.lora import LoraAdapter, LoraSpec, lora_meta
from slackwater.runtime.store.base_models import BaseModel
from slackwater.runtime.store.checkpoints import EXTERNAL, Checkpoint
from slackwater.serve.tinker.weight_files import weight_files
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.weights.joined_file import ExportCatalog
from slackwater.zoo.directory import write_model
from slackwater.zoo.exported import write_merged, write_untied
from slackwater.zoo.tiny import byte_tokenizer_files

TOKENS = tuple(b"the tide turns twice a day, and nobody minds")
SHAPES = {
    "qwen3": NetConfig(
        family="qwen3",
        qk_norm=True,
        vocab_size=261,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        ffn_size=48,
        max_positions=256,
        init_std=0.1,
        eos_token_ids=(258,),
    ),
    "llama": NetConfig(
        family="llama",
        vocab_size=261,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=48,
        max_positions=256,
        init_std=0.1,
        eos_token_ids=(258,),
    ),
}


class Trained:
    """A base model in a folder, and a version over it as a trainer publishes one."""

    def __init__(self, root: Path, shape: NetConfig, lora: LoraSpec | None) -> None:
        torch.set_num_threads(1)
        self.base, self.out = root / "base", root / "out"
        net = load_net(shape, seed=1)
        write_model(self.base, net, byte_tokenizer_files())
        if lora is None:
            tensors = dict(net_tensors(load_net(shape, seed=2)))
        else:
            tensors = dict(LoraAdapter.create(lora, shape).tensors)
            generator = torch.Generator().manual_seed(3)
            for name, tensor in tensors.items():
                if "lora_B" in name:  # A is random as it comes
                    tensor.normal_(0.0, 0.05, generator=generator)
        store = DirectoryWeightStore(root / "weights")
        store.publish("v1", tensors, lora_meta(lora))
        engine = Engine(net, EngineConfig(kv_bytes=1 << 20, page_bytes=4096, max_full_versions=2))
        engine.versions.put("v1", store.pull("v1"), lora=lora)
        self.ours = _scores(engine, "v1")
        assert np.abs(self.ours - _scores(engine, "base")).max() > 0.01, "the weights are others"
        self.exported = root / "exported"
        self.exported.mkdir()
        held = Checkpoint(
            "tinker://m/external_weights/x",
            TenantId("t"),
            ModelId("m"),
            kind=EXTERNAL,
            name="x",
            base_model="tiny",
            lora=LoraShape(lora.rank if lora else 0),
            held_as="v1",
            lineage="",
            size_bytes=0,
            created_s=0.0,
            expires_s=None,
            public=False,
            user_metadata=None,
        )
        base, shelf = BaseModel.read("tiny", self.base), ExportCatalog(root / "weights")
        for name, content in weight_files(held, base, shelf, root / "joined").items():
            data = content if isinstance(content, bytes) else content.read_bytes()
            (self.exported / name).write_bytes(data)


def _scores(engine: Engine, version: str) -> NDArray[np.float32]:
    params = Sampling(max_tokens=0)
    engine.add(GenerationRequest(1, TOKENS, params, version, scores_prompt=True))
    while engine.busy:
        for scores in engine.step().prompt_scores:
            return scores.logprobs[1:]
    raise AssertionError("no scores")


def theirs(model: torch.nn.Module) -> NDArray[np.float32]:
    ids = torch.tensor(TOKENS)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1].float()
    found = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
    return np.asarray(found.numpy(), np.float32)


def loaded(directory: Path) -> torch.nn.Module:
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32
    )
    return model


def agree(ours: NDArray[np.float32], model: torch.nn.Module) -> None:
    np.testing.assert_allclose(theirs(model), ours, atol=1e-4, rtol=0)


BOTH = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
FAMILIES = pytest.mark.parametrize("family", SHAPES)


@BOTH
@FAMILIES
def test_an_adapter_gives_our_logprobs_in_peft(tmp_path: Path, family: str, tied: bool) -> None:
    import peft  # slow to read, and for this test alone

    trained = Trained(tmp_path, replace(SHAPES[family], tied=tied), LoraSpec(4))
    agree(trained.ours, peft.PeftModel.from_pretrained(loaded(trained.base), trained.exported))


@BOTH
@FAMILIES
def test_a_merged_adapter_gives_our_logprobs_in_transformers(
    tmp_path: Path, family: str, tied: bool
) -> None:
    trained = Trained(tmp_path, replace(SHAPES[family], tied=tied), LoraSpec(4))
    write_merged(trained.base, trained.exported, trained.out)
    agree(trained.ours, loaded(trained.out))
    assert transformers.AutoTokenizer.from_pretrained(trained.out).decode([104, 105]) == "hi"


@BOTH
@FAMILIES
def test_full_weights_give_our_logprobs_in_transformers(
    tmp_path: Path, family: str, tied: bool
) -> None:
    trained = Trained(tmp_path, replace(SHAPES[family], tied=tied), None)
    agree(trained.ours, loaded(trained.exported))


def test_an_adapter_without_a_head_leaves_the_embedding_tied(tmp_path: Path) -> None:
    trained = Trained(tmp_path, replace(SHAPES["qwen3"], tied=True), LoraSpec(4, unembed=False))
    write_merged(trained.base, trained.exported, trained.out)
    agree(trained.ours, loaded(trained.out))
    assert json.loads((trained.out / "config.json").read_text())["tie_word_embeddings"] is True
    (tmp_path / "plain").touch()
    plain = (tmp_path / "plain").stat().st_mode  # what the umask gives any new file
    assert (trained.out / "model.safetensors").stat().st_mode == plain


@BOTH
def test_the_cookbook_merges_an_adapter_to_our_logprobs(tmp_path: Path, tied: bool) -> None:
    from tinker_cookbook import weights

    trained = Trained(tmp_path, replace(SHAPES["qwen3"], tied=tied), LoraSpec(4))
    base = trained.base
    if tied:
        base = tmp_path / "untied"
        write_untied(trained.base, base)
    weights.build_hf_model(
        base_model=str(base), adapter_path=str(trained.exported), output_path=str(trained.out)
    )
    agree(trained.ours, loaded(trained.out))


def test_a_folder_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    trained = Trained(tmp_path, SHAPES["qwen3"], LoraSpec(2))
    trained.out.mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        write_merged(trained.base, trained.exported, trained.out)


def test_a_base_of_another_shape_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    trained = Trained(tmp_path, SHAPES["qwen3"], LoraSpec(2))
    write_model(
        tmp_path / "small", load_net(replace(SHAPES["qwen3"], num_layers=1)), byte_tokenizer_files()
    )
    with pytest.raises(ConfigError, match="has no layers"):
        write_merged(tmp_path / "small", trained.exported, trained.out)
    assert not trained.out.exists()
