"""Wishes that change logits: what they do, and that moving a turn or sharing a batch changes
nothing.
"""

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import tiny_engine
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import Collected, plain_logprobs, run

from harness.packed_attention import PackedCausalAttention
from slackwater.engine.config import EngineConfig
from slackwater.engine.engine import Engine
from slackwater.engine.request import GenerationRequest
from slackwater.grammar.guides import GrammarGuides
from slackwater.model.errors import ConfigError
from slackwater.model.sampling import Grammar, Sampling
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net
from slackwater.zoo.tiny import byte_tokenizer

END = 258  # <|im_end|>
VOCAB = 270  # more than the tokenizer's 261, as real models pad theirs
SHAPE = NetConfig(
    family="qwen3",
    qk_norm=True,
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    ffn_size=48,
    max_positions=1024,
    init_std=0.3,
)
PROMPT = tuple(b"say something: ")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 500},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
AS_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_tokenizer().save(str(file))
    return file


@pytest.fixture
def engine(tokenizer: Path) -> Engine:
    return new_engine(tokenizer)


def new_engine(tokenizer: Path, **config: Any) -> Engine:
    torch.set_num_threads(1)
    room = {"kv_bytes": 1 << 23, "page_bytes": 4096, "max_running": 16}
    guides = GrammarGuides(tokenizer, VOCAB, [END])
    words = byte_tokenizer()
    return Engine(
        load_net(SHAPE, seed=5),
        EngineConfig(**(room | config)),
        lambda ids: str(words.decode(list(ids))),
        guides=guides,
    )


def asked(
    number: int,
    sampling: Sampling,
    prompt: tuple[int, ...] = PROMPT,
    generated: tuple[int, ...] = (),
) -> GenerationRequest:
    return GenerationRequest(number, prompt, sampling, "base", generated)


def one(engine: Engine, sampling: Sampling, generated: tuple[int, ...] = ()) -> list[int]:
    return run(engine, asked(1, sampling, generated=generated)).tokens.get(1, [])


def text(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode()


def test_an_answer_follows_its_schema_and_ends_by_itself(engine: Engine) -> None:
    for seed in range(20):
        sampling = Sampling(max_tokens=300, seed=seed, stop_token_ids=[END], grammar=AS_SCHEMA)
        done = run(engine, asked(1, sampling))
        jsonschema_rs.validate(SCHEMA, json.loads(text(done.tokens[1])))
        assert done.finished[1].reason == "stop"


SAMPLE: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 3, "maximum": 12},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"enum": [1, "two", None, [3], {"four": 4}]},
    {"const": {"a": [True, False]}},
    {"type": "string", "pattern": "^[a-f]{2,4}$"},
    {"type": "string", "format": "date"},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "required": ["x"]},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 2}]},
    {"allOf": [{"type": "integer"}, {"minimum": 5}, {"maximum": 6}]},
    {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    },
    {"type": ["null", "integer"]},
    {},
]


@pytest.mark.parametrize("schema", SAMPLE, ids=json.dumps)
def test_answers_to_schemas_of_many_kinds_are_valid(engine: Engine, schema: dict[str, Any]) -> None:
    """A sample of what `slackwater bench schemas` asks for."""
    ending = [(ord(sign), 5.0) for sign in '"}],'] + [(END, 5.0)]
    grammar = Grammar("json_schema", json.dumps(schema))
    sampling = Sampling(600, stop_token_ids=[END], logit_bias=ending, grammar=grammar)
    for seed in range(3):
        said = text(one(engine, replace(sampling, seed=seed)))
        jsonschema_rs.validate(schema, json.loads(said, parse_float=Decimal))


def test_a_choice_and_a_regex_are_followed(engine: Engine) -> None:
    choices = {"heads", "tails", "the edge"}
    grammar = Grammar("choice", json.dumps(sorted(choices)))
    found = {
        text(one(engine, Sampling(max_tokens=20, seed=seed, temperature=3.0, grammar=grammar)))
        for seed in range(40)
    }
    assert found <= choices
    assert len(found) > 1
    date = Grammar("regex", r"[0-9]{4}-[01][0-9]")
    assert len(text(one(engine, Sampling(max_tokens=20, grammar=date)))) == 7


def test_an_end_token_may_come_only_where_the_answer_may_end(engine: Engine) -> None:
    word = Grammar("regex", "[ab]{3,40}")
    for seed in range(10):
        wish = Sampling(max_tokens=60, seed=seed, stop_token_ids=[END], grammar=word)
        wish_ending = biased(wish, END, 4.0)
        tokens = one(engine, wish_ending)
        assert 3 <= len(text(tokens)) <= 40
        assert tokens.count(END) == (tokens[-1] == END)


def biased(sampling: Sampling, token: int, bias: float) -> Sampling:
    return replace(sampling, logit_bias=[(token, bias)])


def test_a_grammar_that_is_not_supported_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"json_schema: is not supported: .*contains"):
        engine.add(asked(1, Sampling(5, grammar=Grammar("json_schema", '{"contains": 3}'))))
    with pytest.raises(ConfigError, match="regex: is not supported"):
        engine.add(asked(1, Sampling(5, grammar=Grammar("regex", "(a("))))
    assert not engine.busy


def test_an_engine_without_a_tokenizer_refuses_a_grammar() -> None:
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        tiny_engine.engine().add(asked(1, Sampling(5, grammar=Grammar("json_object")), (1, 2)))


def test_a_complete_answer_that_arrives_is_told_so_at_once(engine: Engine) -> None:
    sampling = Sampling(max_tokens=300, seed=3, grammar=AS_SCHEMA)
    whole = tuple(one(engine, sampling))
    again = run(engine, asked(1, sampling, generated=whole))
    assert again.tokens == {}
    assert again.finished[1].reason == "stop"


@pytest.mark.parametrize("token", [7, 42])
def test_a_bias_draws_its_token_and_a_ban_does_not(engine: Engine, token: int) -> None:
    assert one(engine, Sampling(10, logit_bias=[(token, 100.0)])) == [token] * 10
    banned = one(engine, Sampling(200, logit_bias=[(token, -100.0)]))
    assert token not in banned


def test_only_allowed_tokens_are_drawn(engine: Engine) -> None:
    allowed = [5, 77, 130]
    tokens = one(engine, Sampling(60, temperature=5.0, allowed_token_ids=allowed))
    assert set(tokens) == set(allowed)
    with pytest.raises(ConfigError, match="allowed_token_ids: token: 270"):
        engine.add(asked(1, Sampling(5, allowed_token_ids=[270])))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_bad_word_is_never_generated_whole_and_its_beginning_is(
    engine: Engine, length: int
) -> None:
    for seed in range(5):
        free = one(engine, Sampling(40, seed=seed))
        bad = free[10 : 10 + length]
        kept = one(engine, Sampling(40, seed=seed, bad_words=[bad]))
        assert all(kept[at : at + length] != bad for at in range(len(kept)))
        if length > 1 and free[:11].count(bad[0]) == 1:
            assert kept[: 9 + length] == free[: 9 + length], "nothing changes before its last token"


def test_a_bad_word_is_found_across_a_move(engine: Engine) -> None:
    free = one(engine, Sampling(30, seed=1))
    bad = free[14:17]
    sampling = Sampling(30, seed=1, bad_words=[bad])
    whole = one(engine, sampling)
    for at in (14, 15, 16, 17):
        assert one(engine, sampling, generated=tuple(whole[:at])) == whole[at:]


def test_nothing_ends_before_the_least_number_of_tokens(engine: Engine) -> None:
    stops = list(range(0, 256, 2))
    for seed in range(5):
        tokens = one(engine, Sampling(40, seed=seed, stop_token_ids=stops, min_tokens=12))
        assert len(tokens) >= 13
        assert not set(tokens[:12]) & set(stops)


def test_min_p_keeps_tokens_within_a_share_of_the_likeliest(engine: Engine) -> None:
    net = load_net(SHAPE, seed=5)
    tokens = one(engine, Sampling(30, temperature=2.0, min_p=0.3))
    logits = plain_logprobs(net, [*PROMPT, *tokens])
    for place, token in enumerate(tokens):
        heated = torch.softmax(logits[len(PROMPT) + place - 1] / 2.0, -1)
        assert heated[token] >= 0.3 * heated.max() - 1e-5


def test_penalties_are_those_of_their_formulas(engine: Engine) -> None:
    """Greedy, against a reference that recomputes every step in plain PyTorch."""
    net = load_net(SHAPE, seed=5)
    wish = Sampling(
        40, temperature=0, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3
    )
    known = list(PROMPT)
    expected: list[int] = []
    for _ in range(40):
        row = plain_logits(net, known)
        seen = torch.tensor(sorted(set(known)))
        row[seen] = torch.where(row[seen] > 0, row[seen] / 1.3, row[seen] * 1.3)
        for token in set(expected):
            row[token] -= 0.7 + 0.4 * expected.count(token)
        expected.append(int(row.argmax()))
        known.append(expected[-1])
    assert one(engine, wish) == expected
    assert one(engine, Sampling(40, temperature=0)) != expected


def plain_logits(net: CausalLM, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.tensor(tokens)
        hidden = net.run_layers(
            ids, torch.arange(len(tokens)), PackedCausalAttention((0, len(tokens)))
        )
        return net.logits(hidden)[-1]


def test_logprobs_are_the_models_own_whatever_shapes_the_draw(engine: Engine) -> None:
    net = load_net(SHAPE, seed=5)
    found = run(engine, asked(1, Sampling(30, logit_bias=[(9, 5.0)], presence_penalty=2.0)))
    tokens = found.tokens[1]
    own = plain_logprobs(net, [*PROMPT, *tokens])
    expected = [float(own[len(PROMPT) + i - 1, token]) for i, token in enumerate(tokens)]
    np.testing.assert_allclose(found.logprobs[1], expected, atol=1e-4)


WISHES = st.sampled_from(
    [
        Sampling(60, grammar=AS_SCHEMA, stop_token_ids=[END]),
        Sampling(60, grammar=Grammar("json_object"), temperature=0.7, top_p=0.9),
        Sampling(40, grammar=Grammar("regex", "([a-f]+[0-9]?)+"), top_k=3, repetition_penalty=1.4),
        Sampling(40, presence_penalty=1.0, frequency_penalty=0.5, min_p=0.05),
        Sampling(40, repetition_penalty=0.8, logit_bias=[(3, 3.0), (4, -9.0)], temperature=1.5),
        Sampling(40, min_tokens=10, stop_token_ids=list(range(0, 256, 3)), top_p=0.8),
        Sampling(40, allowed_token_ids=list(range(40, 90)), temperature=0.9),
    ]
)


@settings(max_examples=20, deadline=None)
@given(wish=WISHES, seed=st.integers(0, 2**62), cuts=st.lists(st.integers(1, 59), max_size=3))
def test_a_moved_turn_goes_on_as_if_it_had_not(
    shared: Path, wish: Sampling, seed: int, cuts: list[int]
) -> None:
    wish = replace(wish, seed=seed)
    alone = run(new_engine(shared), asked(1, wish))
    tokens, logprobs = alone.tokens[1], alone.logprobs[1]
    for cut in cuts:
        before = tuple(tokens[:cut])
        mates = [asked(2 + i, replace(wish, seed=i), PROMPT[i:]) for i in range(3)]
        moved = run(
            new_engine(shared, max_step_tokens=32), asked(1, wish, generated=before), *mates
        )
        assert [*before, *moved.tokens.get(1, [])] == tokens
        assert [*logprobs[:cut], *moved.logprobs.get(1, [])] == logprobs
        assert moved.finished[1].reason == alone.finished[1].reason


@pytest.fixture(scope="module")
def shared(tokenizer: Path) -> Path:
    return tokenizer


def test_a_preempted_answer_still_follows_its_schema(tokenizer: Path) -> None:
    block = SHAPE.kv_values_per_token * 16 * 4
    tight = new_engine(tokenizer, kv_bytes=26 * block, page_bytes=block)
    sampling = [Sampling(150, seed=i, grammar=AS_SCHEMA) for i in range(8)]
    roomy = run(new_engine(tokenizer), *[asked(i, s) for i, s in enumerate(sampling)])
    crowded = Collected()
    for i, wish in enumerate(sampling):
        tight.add(asked(i, wish))
    while tight.busy:
        crowded.take(tight)
    assert tight.gauges()["preemptions"] > 0
    assert crowded.tokens == roomy.tokens
