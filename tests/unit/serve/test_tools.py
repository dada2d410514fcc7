"""Calls of tools: read whole or as they stream, written for any template, and forced by a
grammar.
"""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.grammar.guides import check
from slackwater.model.errors import ConfigError, RefusedError
from slackwater.model.sampling import Grammar
from slackwater.serve.openai.tools import (
    CallStream,
    Function,
    Tool,
    ToolCall,
    ToolChoice,
    ToolPlan,
    describe_tools_in_messages,
    parse_call_arguments,
    read_calls,
)

WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "$defs": {"City": {"type": "string", "maxLength": 20}},
}
TOOLS = [
    Tool(type="function", function=Function(name="weather", parameters=WEATHER)),
    Tool(type="function", function=Function(name="time")),
]


def plan(form: Any = "hermes", **wishes: Any) -> ToolPlan:
    return ToolPlan(TOOLS, form, **wishes)


def said(name: str, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def pairs(calls: Any) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


def test_calls_are_read_with_what_is_said_before_them() -> None:
    text = "Let me see.\n" + said("weather", city="Oslo") + "\n" + said("time")
    content, calls = read_calls(text, plan())
    assert content == "Let me see."
    assert pairs(calls) == [("weather", {"city": "Oslo"}), ("time", {})]
    assert len({call.call_id for call in calls}) == 2


def test_only_the_first_call_is_taken_where_parallel_calls_are_not_wanted() -> None:
    _, calls = read_calls(said("time") + said("time"), plan(parallel=False))
    assert len(calls) == 1


@pytest.mark.parametrize(
    "text",
    ["no call", "<tool_call>not json</tool_call>", said("unknown"), '{"name": 3}', "<tool_call>[]"],
)
@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_text_that_is_no_call_of_these_tools_stays_text(text: str, form: str) -> None:
    assert read_calls(text, plan(form)) == (text, [])


def test_llama_writes_bare_objects() -> None:
    text = '<|python_tag|>{"name": "weather", "parameters": {"city": "a;b"}}'
    assert pairs(read_calls(text, plan("llama"))[1]) == [("weather", {"city": "a;b"})]
    two = '{"name": "time", "parameters": {}}; {"name": "weather", "parameters": {"city": "Oslo"}}'
    assert [name for name, _ in pairs(read_calls(two, plan("llama"))[1])] == ["time", "weather"]


TEXTS = st.sampled_from(
    [
        "hello <tool",
        "a < b, c <tool_cal",
        "",
        said("time"),
        "one moment\n" + said("weather", city="Å <tool_call>") + "\n" + said("time"),
        said("nobody") + " after",
        "<tool_call>never closed",
        "<tool_call>" + json.dumps({"name": "time", "arguments": {}}),
        '{"name": "time", "parameters": {}}',
    ]
)


@settings(max_examples=300)
@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 120), max_size=6),
    form=st.sampled_from(["hermes", "llama"]),
)
def test_a_stream_gives_the_same_calls_wherever_it_is_cut(
    text: str, cuts: list[int], form: str
) -> None:
    stream = CallStream(plan(form))
    content, edges = "", [0, *sorted(cuts), len(text)]
    calls: list[ToolCall] = []
    for start, stop in pairwise(edges):
        shown, found = stream.feed(text[start:stop])
        content, calls = content + shown, calls + found
    shown, found = stream.feed("", final=True)
    whole_content, whole_calls = read_calls(text, plan(form))
    assert pairs(calls + found) == pairs(whole_calls)
    if not whole_calls:
        assert content + shown == whole_content
    assert stream.count == len(whole_calls)


def test_a_template_that_knows_no_tools_is_told_in_words() -> None:
    history: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "1", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    told = describe_tools_in_messages(parse_call_arguments(history), TOOLS)
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert told[0]["content"].startswith("Be brief.")
    assert '"name": "weather"' in told[0]["content"]
    assert told[2]["content"] == said("weather", city="Oslo")
    assert "rain" in told[3]["content"]


def test_every_wish_gives_a_grammar_that_can_be_followed() -> None:
    strict = [Tool(type="function", function=Function(name="f", parameters=WEATHER, strict=True))]
    answer = Grammar("json_schema", json.dumps(WEATHER))
    for wish in (
        plan(forced=True).grammar(None),
        plan(forced=True, only="weather", parallel=False).grammar(None),
        plan("llama", forced=True).grammar(None),
        plan().grammar(answer),
        ToolPlan(strict, "hermes").grammar(None),
    ):
        assert wish is not None
        check(wish)
    assert plan().grammar(None) is None
    with pytest.raises(RefusedError, match="strict"):
        ToolPlan(strict, "llama").grammar(None)


def test_a_choice_names_a_tool_that_is_there() -> None:
    chosen = ToolChoice.model_validate({"type": "function", "function": {"name": "nobody"}})
    with pytest.raises(ConfigError, match="must be one of weather, time"):
        ToolPlan.create(TOOLS, chosen, "hermes", None)
    assert ToolPlan.create(TOOLS, "none", "hermes", None) is None
    assert ToolPlan.create([], "auto", "hermes", None) is None
