"""A small random byte-level model, for training from scratch and for tests."""

from dataclasses import replace
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from slackwater.model.byte_level import byte_characters
from slackwater.model.errors import ConfigError
from slackwater.nets.config import NetConfig
from slackwater.zoo.directory import TokenizerFiles, write_model

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _make_config(hidden_size: int, num_layers: int) -> NetConfig:
    """Heads of 32 suit other engines. `init_std` keeps a layer's scale: 0.02 learns far slower."""
    heads = hidden_size // 32
    return NetConfig(
        family="qwen3",
        qk_norm=True,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads // 2,
        head_dim=32,
        ffn_size=3 * hidden_size,
        max_positions=1024,
        init_std=hidden_size**-0.5,
    )


SIZES: dict[str, NetConfig] = {
    "tiny": _make_config(64, 2),
    "small": _make_config(128, 4),
    "compact": _make_config(256, 4),
    "medium": _make_config(512, 8),
}


def byte_tokenizer() -> Tokenizer:
    """261 tokens: token b is byte b, then the special tokens of a chat."""
    tokenizer = Tokenizer(models.BPE(vocab=byte_characters(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def byte_tokenizer_files() -> TokenizerFiles:
    """The byte tokenizer with its chat template; a turn ends with `<|im_end|>`."""
    return TokenizerFiles(
        tokenizer=byte_tokenizer(),
        end_token="<|im_end|>",
        pad_token="<|endoftext|>",
        start_token="<|endoftext|>",
        special_tokens=SPECIAL_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(size: str, directory: Path, seed: int = 0) -> None:
    from slackwater.nets.loading import load_net  # late: 2 s for PyTorch

    if size not in SIZES:
        raise ConfigError.of("size", size, f"is not known; write one of {', '.join(SIZES)}")
    text = byte_tokenizer_files()
    config = replace(SIZES[size], eos_token_ids=(text.end_token_id,))
    write_model(directory, load_net(config, seed=seed), text)
