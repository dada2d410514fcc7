"""Continuous tokens: whatever is said next, the tokens of the turns before stay as they are.

Chat templates of seven families, over a tokenizer whose merges cross every boundary. Real model
directories are tried too if SLACKWATER_TOKENIZERS names some, separated by colons.
"""
# ruff: noqa: RUF001  (DeepSeek's special tokens have wide bars)

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from slackwater.serve.openai.prompts import Conversation
from slackwater.serve.openai.text import TextCodec
from slackwater.serve.openai.token_history import (
    ConversationRecord,
    TokenHistory,
    conversation_keys,
)

# family -> (template, special tokens, the token that ends a turn)
FAMILIES: dict[str, tuple[str, Sequence[str], str]] = {
    "qwen": (
        "{% for m in messages %}{% set c = m.content %}"
        "{% if m.role == 'assistant' and not loop.last and '</think>' in c %}"
        "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
    ),
    "llama-3": (
        "{{ '<|begin_of_text|>' }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim"
        " + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
    "llama-2": (
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '<s>[INST] ' + m.content | trim + ' [/INST]' }}{% else %}"
        "{{ ' ' + m.content | trim + ' </s>' }}{% endif %}{% endfor %}",
        ("<s>", "</s>"),
        "</s>",
    ),
    "mistral": (
        "{{ '<s>' }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ m.content + '</s>' }}{% endif %}"
        "{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        "</s>",
    ),
    "gemma": (
        "{{ '<bos>' }}{% for m in messages %}"
        "{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
    ),
    "deepseek": (
        "{{ '<｜begin▁of▁sentence｜>' }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '<｜User｜>' + m.content }}{% else %}"
        "{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
        (
            "<｜begin▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜end▁of▁sentence｜>",
        ),
        "<｜end▁of▁sentence｜>",
    ),
    "phi": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
        ("<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
    ),
}
REAL = [Path(place) for place in os.environ.get("SLACKWATER_TOKENIZERS", "").split(":") if place]


def make_codec(directory: Path, family: str) -> TextCodec:
    template, special, end = FAMILIES[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the tide is\n\n in. [INST] the \n\nuser\n tide " * 4], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": end}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return TextCodec(directory)


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[TextCodec, int]]:
    """Each family's codec, and the id of the token that ends a turn."""
    folder = tmp_path_factory.mktemp("codecs")
    found = {}
    for family, (_, _, end) in FAMILIES.items():
        codec = make_codec(folder / family, family)
        (token,) = codec.encode(end, special=False)
        found[family] = (codec, token)
    for place in REAL:
        config = json.loads((place / "tokenizer_config.json").read_text())
        end = config["eos_token"]
        codec = TextCodec(place)
        (token,) = codec.encode(end if isinstance(end, str) else end["content"], special=False)
        found[str(place)] = (codec, token)
    return found


ANSWER = st.tuples(st.lists(st.integers(0, 380), min_size=1, max_size=8), st.booleans())
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)


@pytest.mark.parametrize("family", [*FAMILIES, *map(str, REAL)])
@given(turns=st.lists(st.tuples(WORDS, ANSWER), min_size=2, max_size=4))
@settings(max_examples=60)
def test_the_tokens_of_earlier_turns_never_change(
    codecs: dict[str, tuple[TextCodec, int]],
    family: str,
    turns: list[tuple[str, tuple[list[int], bool]]],
) -> None:
    codec, end = codecs[family]
    history, messages, before = TokenHistory(), list[dict[str, Any]](), list[int]()
    for words, (sampled, ended) in turns:
        messages.append({"role": "user", "content": words})
        chat = Conversation(list(messages))
        record = ConversationRecord(history, "me", None, chat.messages)
        known = record.find_known_prefix()
        assert (known is None) == (not before), "an answered conversation is known"
        prompt = (
            chat.tokens(codec) if known is None else chat.tokens_after(codec, known[1], known[0])
        )
        assert prompt[: len(before)] == before
        added = codec.decode(prompt[len(before) :], special=True)
        # Some vocabularies lack bytes, so that a rare character is lost whatever is done here.
        if codec.decode(codec.encode(words, special=False), special=True) == words:
            assert words.strip() in added, "what is new is said"
            assert chat.text(codec).endswith(added.lstrip()), "as the template says it"
        answer = [*sampled, end] if ended else sampled
        said = codec.decode(answer)
        before = [*prompt, *answer]
        messages.append({"role": "assistant", "content": said})
        record.remember_answer(messages[-1], before)


def test_without_it_an_answer_is_tokenized_anew(codecs: dict[str, tuple[TextCodec, int]]) -> None:
    """The case that this is for: letters were sampled one by one that are one token together."""
    codec, end = codecs["qwen"]
    merged = next(text for text in map(codec.token_text, range(256, 400)) if text.isalpha())
    sampled = [token for letter in merged for token in codec.encode(letter, special=False)]
    prompt = Conversation([{"role": "user", "content": "?"}]).tokens(codec)
    chat = Conversation(
        [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": merged},
            {"role": "user", "content": "!"},
        ]
    )
    before = [*prompt, *sampled, end]
    assert chat.tokens(codec)[: len(before)] != before
    assert chat.tokens_after(codec, before, 2)[: len(before)] == before


def test_thoughts_that_a_template_drops_from_history_stay(
    codecs: dict[str, tuple[TextCodec, int]],
) -> None:
    codec, end = codecs["qwen"]
    prompt = Conversation([{"role": "user", "content": "?"}]).tokens(codec)
    before = [*prompt, *codec.encode("<think>hm</think>\nno", special=False), end]
    messages = [{"role": "user", "content": "?"}]
    messages += [{"role": "assistant", "content": "<think>hm</think>\nno"}]
    chat = Conversation([*messages, {"role": "user", "content": "!"}])
    assert "<think>" not in chat.text(codec)
    text = codec.decode(chat.tokens_after(codec, before, 2), special=True)
    assert "<think>hm</think>\nno<|im_end|>\n<|im_start|>user\n!<|im_end|>" in text


def test_another_owner_other_tools_and_another_answer_are_other_conversations() -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    key = conversation_keys("me", said)[-1]
    assert conversation_keys("you", said)[-1] != key
    assert conversation_keys("me", said, ["a tool"])[-1] != key
    assert conversation_keys("me", [said[0], {**said[1], "content": "b "}])[-1] != key
    assert conversation_keys("me", [said[0], {**said[1], "refusal": None}])[-1] == key


def test_the_oldest_conversations_are_forgotten_first() -> None:
    history = TokenHistory(most_tokens=250)
    history.remember("me", "a", [1] * 4)
    history.remember("me", "b", [2] * 4)
    history.remember("me", "b", [2] * 4)
    assert history.find_longest("me", ["a"]) == (1, [1] * 4)  # and is fresh again
    history.remember("me", "c", [3] * 4)
    assert history.find_longest("me", ["b"]) is None
    assert history.find_longest("me", ["a", "x", "c", "y"]) == (3, [3] * 4)


def test_answers_without_tokens_are_not_remembered_without_end() -> None:
    history = TokenHistory(most_tokens=1000)
    for number in range(100):
        history.remember("me", str(number), [])
    assert sum(history.find_longest("me", [str(number)]) is not None for number in range(100)) == 10


def test_one_owner_does_not_push_out_anothers_conversations() -> None:
    history = TokenHistory(most_tokens=1000)
    history.remember("quiet", "a", [1])
    for number in range(100):
        history.remember("loud", str(number), [2])
    assert history.find_longest("quiet", ["a"]) == (1, [1])
    assert history.find_longest("loud", ["98"]) is not None
    assert history.find_longest("loud", ["a"]) is None
