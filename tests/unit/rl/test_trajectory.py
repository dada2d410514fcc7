"""An interaction as one growing list of tokens, and the datum it becomes."""

import json
from pathlib import Path

import numpy as np
import pytest
import transformers

from slackwater.rl.rollout import Trajectory
from slackwater.rl.text import ChatText, PlainText, text_of
from slackwater.zoo.tiny import CHAT_TEMPLATE, byte_tokenizer

END = 258


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> "transformers.PreTrainedTokenizerFast":
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    found = transformers.AutoTokenizer.from_pretrained(folder)
    assert isinstance(found, transformers.PreTrainedTokenizerFast)
    return found


def test_a_datum_predicts_each_next_token_and_pushes_the_sampled_ones_only() -> None:
    trajectory = Trajectory([5, 6, 7])
    trajectory.act([10, END], [-1.0, -2.0])
    trajectory.observe([8])
    trajectory.act([11], [-3.0])
    pushes = np.array([0.5, 0.25, -1.0], np.float32)
    datum = trajectory.policy_datum(pushes)
    inputs = {name: data.to_numpy() for name, data in datum.loss_fn_inputs.items()}
    assert datum.model_input.to_ints() == [5, 6, 7, 10, END, 8]
    assert inputs["target_tokens"].tolist() == [6, 7, 10, END, 8, 11]
    assert inputs["advantages"].tolist() == [0, 0, 0.5, 0.25, 0, -1]
    assert inputs["logprobs"].tolist() == [0, 0, -1, -2, 0, -3]
    assert trajectory.sampled_logprobs.tolist() == [-1, -2, -3]
    assert trajectory.turns == 2
    weights = trajectory.cross_entropy_datum(0.5).loss_fn_inputs["weights"].to_numpy()
    assert weights.tolist() == [0, 0, 0.5, 0.5, 0, 0.5]


def test_plain_text_is_itself_and_an_answer_ends_with_the_end_token(
    tokenizer: "transformers.PreTrainedTokenizerFast",
) -> None:
    text = text_of("plain", tokenizer)
    assert isinstance(text, PlainText)
    assert bytes(text.first("1+1=")) == b"1+1="
    assert text.encode_answer("2") == [ord("2"), END]
    assert text.answer([ord("2"), END]) == "2"
    assert text.next("ok?", ended=False) == [END, *b"ok?"]
    assert text.next("ok?", ended=True) == list(b"ok?")


@pytest.mark.parametrize("ended", [True, False])
def test_a_chat_grows_to_what_the_template_makes_of_the_whole(
    tokenizer: "transformers.PreTrainedTokenizerFast", ended: bool
) -> None:
    text = text_of("chat", tokenizer)
    assert isinstance(text, ChatText)
    said = text.encode_answer("4") if ended else text.encode_answer("4")[:-1]
    grown = [*text.first("2+2?"), *said, *text.next("sure?", ended)]
    whole = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "sure?"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert tokenizer.decode(grown) == whole
