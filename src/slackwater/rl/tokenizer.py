"""A model's tokenizer for a driver, which has no model and should load no PyTorch.

The SDK's `get_tokenizer` imports transformers and PyTorch with it: 6 s of CPU time and 270 MB.
Plain text needs neither, if the model's tokenizer file is its whole tokenizer.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import tinker

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class FileTokenizer:
    """`tokenizer.json` alone, with the methods of the SDK's tokenizer that plain text needs."""

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

    def special_tokens(self) -> set[str]:
        """The special tokens that the file names."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return {token.content for token in added if token.special}


def load_tokenizer(training: "tinker.TrainingClient", kind: Literal["plain", "chat"]) -> Any:
    """The model's tokenizer file if that suffices for this kind of text, else the SDK's."""
    directory = training.get_info().model_data.tokenizer_id
    tokenizer = file_tokenizer(Path(directory)) if kind == "plain" and directory else None
    return tokenizer or training.get_tokenizer()


def file_tokenizer(directory: Path) -> FileTokenizer | None:
    """A tokenizer of the file alone; None if transformers would do more than read it.

    That is the case for own classes, other kinds of files, special tokens added by the
    configuration, or spaces removed from decoded text.
    """
    file, config_file = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if not file.is_file() or not config_file.is_file():
        return None
    config = json.loads(config_file.read_text())
    if config.get("tokenizer_class") != "PreTrainedTokenizerFast":
        return None
    if config.get("clean_up_tokenization_spaces") or not isinstance(config.get("eos_token"), str):
        return None
    tokenizer = FileTokenizer(file, config["eos_token"])
    needed = [config[name] for name in _SPECIAL if config.get(name) is not None]
    needed += config.get("additional_special_tokens") or []
    special_tokens = tokenizer.special_tokens()
    is_complete = all(isinstance(name, str) and name in special_tokens for name in needed)
    return tokenizer if is_complete else None
