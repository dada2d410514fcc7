"""Requests to /v1/responses as chats: what is read, and that nothing odd is a server error."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from slackwater.model.errors import RefusedError, SlackwaterError
from slackwater.serve.openai.bodies import ChatBody
from slackwater.serve.openai.responses import ResponsesBody


def chat_of(**fields: Any) -> ChatBody:
    return ResponsesBody.model_validate({"model": "tiny", "input": "hi", **fields}).to_chat()


def test_items_become_messages_and_calls_of_one_turn_one_message() -> None:
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    items = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {**call, "call_id": "1"},
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
    ]
    chat = chat_of(input=items, instructions="first", reasoning={"effort": "low"})
    said = [message.plain() for message in chat.messages]
    assert [m["role"] for m in said] == ["system", "system", "user", "assistant", "tool"]
    assert [m["content"] for m in said[:3]] == ["first", "be brief", "go"]
    assert [c["id"] for c in said[3]["tool_calls"]] == ["1", "2"]
    assert said[4]["tool_call_id"] == "1"
    assert chat.reasoning_effort == "low"


@pytest.mark.parametrize("field", ["previous_response_id", "conversation", "invented"])
def test_what_is_not_done_is_refused_by_name(field: str) -> None:
    with pytest.raises(RefusedError, match=f"{field}: is not supported here"):
        chat_of(**{field: "x"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
KINDS = st.sampled_from(["message", "function_call", "function_call_output", "input_text"]) | JSON
ITEM = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("name", "arguments", "call_id", "output", "content", "text"), JSON),
        "role": st.sampled_from(["user", "assistant", "developer"]) | JSON,
        "type": KINDS,
    },
)


@given(
    st.lists(ITEM, min_size=1, max_size=3),
    st.lists(ITEM, max_size=2),
    st.none() | ITEM,
    st.none() | ITEM,
)
@settings(max_examples=150)
def test_any_json_is_a_chat_or_a_clear_error(
    items: list[Any], tools: list[Any], choice: Any, form: Any
) -> None:
    try:
        chat = chat_of(input=items, tools=tools, tool_choice=choice, text={"format": form})
    except (ValidationError, SlackwaterError):
        return
    assert chat.messages
