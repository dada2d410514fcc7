"""A driver reads a tokenizer file as transformers would, or leaves the model to transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.rl.tokenizer import file_tokenizer
from slackwater.zoo.tiny import make_model

PIECES = st.one_of(
    st.text(max_size=12), st.sampled_from(["<|im_end|>", "<|im_start|>user\n", "<think>", " ", "é"])
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_model("tiny", directory, 0)
    return directory


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@settings(max_examples=200)
@given(pieces=st.lists(PIECES, max_size=8), cut=st.integers(0, 20))
def test_text_and_tokens_are_as_transformers_has_them(
    model: Path, reference: Any, pieces: list[str], cut: int
) -> None:
    found = file_tokenizer(model)
    assert found is not None
    assert (found.eos_token, found.eos_token_id) == (reference.eos_token, reference.eos_token_id)
    text = "".join(pieces)
    tokens = found.encode(text, add_special_tokens=False)
    assert tokens == reference.encode(text, add_special_tokens=False)
    for part in (tokens, tokens[cut:], tokens[:cut]):  # also where a character is cut in two
        assert found.decode(part) == reference.decode(part)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"clean_up_tokenization_spaces": True},
        {"eos_token": {"content": "<|im_end|>"}},
        {"additional_special_tokens": ["<|new|>"]},
        {"pad_token": "<pad>"},
    ],
)
def test_what_transformers_would_add_or_change_is_left_to_it(
    model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    assert file_tokenizer(copy) is not None
    described = copy / "tokenizer_config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | changes))
    assert file_tokenizer(copy) is None


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json"])
def test_a_model_without_its_files_is_left_to_transformers(
    model: Path, tmp_path: Path, missing: str
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    (copy / missing).unlink()
    assert file_tokenizer(copy) is None
