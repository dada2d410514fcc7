"""A Llama-like model from a GGUF file: fp32 weights and its byte-level tokenizer."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from slackwater.model.errors import ConfigError
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net
from slackwater.zoo.directory import TokenizerFiles, write_model

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3
Progress = Callable[[str, float], None]


class GgufModel:
    """An open GGUF file; tensors are read one at a time."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
            raise ConfigError.of("GGUF file", str(path), f"cannot be read: {error}") from None
        architecture = self._value("general.architecture")
        if architecture != "llama":
            raise ConfigError.of("general.architecture", architecture, "must be llama")
        if self._value("tokenizer.ggml.model") != "gpt2":
            raise ConfigError.of(
                "tokenizer.ggml.model", self._value("tokenizer.ggml.model"), "must be gpt2"
            )

    def config(self) -> NetConfig:
        heads = int(self._value("llama.attention.head_count"))
        hidden = int(self._value("llama.embedding_length"))
        names = {tensor.name for tensor in self._reader.tensors}
        return NetConfig(
            family="llama",
            vocab_size=len(self._value("tokenizer.ggml.tokens")),
            hidden_size=hidden,
            num_layers=int(self._value("llama.block_count")),
            num_heads=heads,
            num_kv_heads=int(self._value("llama.attention.head_count_kv")),
            head_dim=hidden // heads,
            ffn_size=int(self._value("llama.feed_forward_length")),
            max_positions=int(self._value("llama.context_length")),
            rope_theta=float(self._value("llama.rope.freq_base")),
            norm_eps=float(self._value("llama.attention.layer_norm_rms_epsilon")),
            tied="output.weight" not in names,
            eos_token_ids=(int(self._value("tokenizer.ggml.eos_token_id")),),
        )

    @property
    def num_tensors(self) -> int:
        return len(self._reader.tensors)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each weight by its Hugging Face name."""
        config = self.config()
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        for stored in self._reader.tensors:
            values = gguf.dequantize(stored.data, stored.tensor_type)
            tensor = torch.from_numpy(values.copy())
            parts = stored.name.split(".")
            if parts[0] != "blk":
                yield f"{_TOP_NAMES[parts[0]]}.{parts[-1]}", tensor
                continue
            if parts[2] in heads:
                tensor = _separate_halves(tensor, heads[parts[2]])
            yield f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[-1]}", tensor

    def tokenizer_files(self) -> TokenizerFiles:
        """The file's tokenizer and chat template."""
        tokens: list[str] = self._value("tokenizer.ggml.tokens")
        kinds: list[int] = self._value("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ", 1)) for merge in self._value("tokenizer.ggml.merges")]
        special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        pieces: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if self._value("tokenizer.ggml.pre") == "smollm":
            pieces.insert(0, pre_tokenizers.Digits(individual_digits=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
        return TokenizerFiles(
            tokenizer=tokenizer,
            end_token=tokens[int(self._value("tokenizer.ggml.eos_token_id"))],
            pad_token=tokens[int(self._value("tokenizer.ggml.padding_token_id"))],
            start_token=tokens[int(self._value("tokenizer.ggml.bos_token_id"))],
            special_tokens=special,
            chat_template=self._value("tokenizer.chat_template"),
        )

    def _value(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        if field is None:
            raise ConfigError.of("GGUF field", key, "is missing; take another file")
        return field.contents()


def _separate_halves(weight: Tensor, heads: int) -> Tensor:
    """GGUF interleaves rows that rotate together; Hugging Face stores a head's halves one after the
    other.
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def write_gguf_model(path: Path, directory: Path, progress: Progress) -> None:
    """Write the model of a GGUF file as a model directory, with fp32 weights."""
    model = GgufModel(path)
    net = load_net(model.config())
    parameters = dict(net.named_parameters())
    with torch.no_grad():
        for done, (name, tensor) in enumerate(model.tensors()):
            progress("reading weights", 0.35 + 0.45 * done / model.num_tensors)
            parameters.pop(name).copy_(tensor)
    if parameters:
        raise ConfigError.of("GGUF tensors", sorted(parameters)[:3], "are missing")
    progress("writing", 0.8)
    write_model(directory, net, model.tokenizer_files())
    progress("done", 1.0)
