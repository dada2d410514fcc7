"""A model as a Hugging Face directory (net, tokenizer, chat template), written atomically."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from slackwater.model.folder import partial_folder

if TYPE_CHECKING:
    from slackwater.nets.causal_lm import CausalLM


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The text part of a model directory: tokenizer, special tokens and chat template."""

    tokenizer: Tokenizer
    end_token: str
    pad_token: str
    start_token: str
    special_tokens: Sequence[str]
    chat_template: str

    @property
    def end_token_id(self) -> int:
        found = self.tokenizer.token_to_id(self.end_token)
        assert found is not None, f"{self.end_token} is in the vocabulary"
        return int(found)


@contextlib.contextmanager
def whole_folder(directory: Path) -> Iterator[Path]:
    """A folder beside `directory` that takes its place if the block succeeds."""
    with partial_folder(directory) as partial:
        yield partial
        shutil.rmtree(directory, ignore_errors=True)
        partial.replace(directory)


def write_model(directory: Path, net: "CausalLM", text: TokenizerFiles) -> None:
    """Write a whole model, replacing an existing one."""
    from slackwater.nets.loading import save_net  # late: 2 s for PyTorch

    with whole_folder(directory) as partial:
        save_net(net, partial)
        _write_tokenizer_files(partial, net, text)


def _write_tokenizer_files(directory: Path, net: "CausalLM", text: TokenizerFiles) -> None:
    text.tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": text.start_token,
        "eos_token": text.end_token,
        "pad_token": text.pad_token,
        "additional_special_tokens": list(text.special_tokens),
        "chat_template": text.chat_template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": net.config.max_positions,
    }
    generation_config = {"eos_token_id": text.end_token_id}
    for name, content in (
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
