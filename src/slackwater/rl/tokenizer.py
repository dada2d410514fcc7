"""A model's tokenizer for a driver, which holds no model and should load no PyTorch.

The SDK's `get_tokenizer` imports transformers and PyTorch with it: 6 s of CPU time and 270 MB.
Plain text of a model whose tokenizer file is all of its tokenizer needs neither.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import tinker

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class FileTokenizer:
    """`tokenizer.json` alone, with those of the SDK's methods that plain text needs."""

    def __init__(self, file: Path, eos_token: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.eos_token, self.eos_token_id = eos_token, self._tokenizer.token_to_id(eos_token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def special(self) -> set[str]:
        """The special tokens that the file names."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return {token.content for token in added if token.special}


def load_tokenizer(training: "tinker.TrainingClient", kind: Literal["plain", "chat"]) -> Any:
    """For text of this kind: the model's file where it is enough, else what the SDK finds."""
    directory = training.get_info().model_data.tokenizer_id
    found = file_tokenizer(Path(directory)) if kind == "plain" and directory else None
    return found or training.get_tokenizer()


def file_tokenizer(directory: Path) -> FileTokenizer | None:
    """None if transformers would do more than read the file: classes of its own, a file of another
    kind, special tokens added by the configuration, or spaces removed from what is decoded.
    """
    file, described = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if not file.is_file() or not described.is_file():
        return None
    config = json.loads(described.read_text())
    if config.get("tokenizer_class") != "PreTrainedTokenizerFast":
        return None
    if config.get("clean_up_tokenization_spaces") or not isinstance(config.get("eos_token"), str):
        return None
    found = FileTokenizer(file, config["eos_token"])
    named = [config[name] for name in _SPECIAL if config.get(name) is not None]
    named += config.get("additional_special_tokens") or []
    known = found.special()
    return found if all(isinstance(name, str) and name in known for name in named) else None
