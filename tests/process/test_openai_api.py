"""The face of a vLLM server, by the unmodified openai client: what is asked for is done, or refused
by name.
"""

import json
from typing import Any

import jsonschema_rs
import openai
import pytest
import tinker

from .service_process import ServiceProcess

pytestmark = pytest.mark.process

CHAT: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["rain", "sun"]},
    },
    "required": ["city", "kind"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "tells it", "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "time"}},
]


@pytest.fixture(scope="module")
def client(service: ServiceProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0)


def complete(client: openai.OpenAI, **wishes: Any) -> Any:
    settings: dict[str, Any] = {
        "model": "tiny",
        "prompt": "hello",
        "max_tokens": 8,
        "seed": 1,
    } | wishes
    return client.completions.create(**settings)


def ask(client: openai.OpenAI, **wishes: Any) -> Any:
    settings: dict[str, Any] = {
        "model": "tiny",
        "messages": CHAT,
        "max_tokens": 200,
        "seed": 1,
    } | wishes
    return client.chat.completions.create(**settings)


def ids(answer: Any) -> list[int]:
    found: list[int] = answer.choices[0].token_ids
    return found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nobody_thought_of_this", 1),
        ("use_beam_search", True),
        ("functions", [{"name": "f"}]),
        ("chat_template", "{{ messages }}"),
        ("reasoning_effort", "boundless"),
        ("return_tokens_as_token_ids", True),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("stream_options", {"include_obfuscation": True}),
        ("tools", [{"type": "web_search"}]),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"contains": {}}}}),
    ],
)
def test_what_is_not_done_is_refused_by_its_name(
    client: openai.OpenAI, field: str, value: object
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, extra_body={field: value})
    named = "json_schema" if field == "response_format" else field
    assert named in refused.value.message


def test_a_field_that_asks_for_nothing_passes(client: openai.OpenAI) -> None:
    nothing = {"bad_words": [], "use_beam_search": False, "suffix": None, "never_heard_of": None}
    assert complete(client, extra_body=nothing).choices


def test_bad_words_are_never_written(client: openai.OpenAI) -> None:
    settings = {"temperature": 0.0, "max_tokens": 24, "seed": 3}
    free = complete(client, **settings, extra_body={"return_token_ids": True})
    bad = bytes(token for token in ids(free) if 33 <= token < 127)[:1].decode() or "a"
    kept = complete(
        client, **settings, extra_body={"return_token_ids": True, "bad_words": [bad, "zq"]}
    )
    assert bad not in kept.choices[0].text
    assert "zq" not in kept.choices[0].text


def test_answers_of_a_given_form(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    answer = ask(client, response_format=form)
    jsonschema_rs.validate(SCHEMA, json.loads(answer.choices[0].message.content))
    assert answer.choices[0].finish_reason == "stop"
    chosen = ask(client, extra_body={"guided_choice": ["yes", "no"]})
    assert chosen.choices[0].message.content in ("yes", "no")
    matched = complete(client, extra_body={"structured_outputs": {"regex": "[0-9]{5}"}})
    assert matched.choices[0].text.isdigit()
    with pytest.raises(openai.BadRequestError, match="two forms"):
        ask(client, response_format=form, extra_body={"guided_regex": "a"})


def test_an_object_is_an_object(client: openai.OpenAI) -> None:
    ending = {str(ord(sign)): 6 for sign in '"}'}
    answer = ask(client, response_format={"type": "json_object"}, logit_bias=ending)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_a_tool_that_must_be_called_is_called(client: openai.OpenAI) -> None:
    answer = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    choice = answer.choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name in ("weather", "time")
    assert isinstance(json.loads(call.function.arguments), dict)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    named = {"type": "function", "function": {"name": "weather"}}
    (call,) = ask(client, tools=TOOLS, tool_choice=named).choices[0].message.tool_calls
    jsonschema_rs.validate(SCHEMA, json.loads(call.function.arguments))


def test_calls_are_streamed(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    whole = ask(client, tools=TOOLS, tool_choice=named).choices[0].message.tool_calls[0]
    name = arguments = ""
    for chunk in ask(client, tools=TOOLS, tool_choice=named, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        assert not chunk.choices[0].delta.content
    assert (name, arguments) == ("weather", whole.function.arguments)


def test_a_conversation_with_calls_and_results_goes_on(client: openai.OpenAI) -> None:
    (call,) = (
        ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        .choices[0]
        .message.tool_calls
    )
    history = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "42"},
    ]
    assert ask(client, messages=history, tools=TOOLS, max_tokens=4).choices[0].message


def test_wishes_that_change_the_draw(client: openai.OpenAI) -> None:
    asked = {"return_token_ids": True}
    assert ids(complete(client, logit_bias={"65": 100}, extra_body=asked)) == [65] * 8
    allowed = {"allowed_token_ids": [66, 67], "min_p": 0.01, **asked}
    assert set(ids(complete(client, temperature=5.0, extra_body=allowed))) <= {66, 67}
    greedy = {"temperature": 0, "max_tokens": 40}
    plain = ids(complete(client, **greedy, extra_body=asked))
    for wish in ({"repetition_penalty": 1.8}, {"presence_penalty": 2.0}, {"frequency_penalty": 2}):
        assert ids(complete(client, **greedy, extra_body={**asked, **wish})) != plain
    stops = {"stop_token_ids": list(range(256)), "min_tokens": 5, **asked}
    assert len(ids(complete(client, max_tokens=20, extra_body=stops))) == 6


def test_a_stop_string_can_be_kept(client: openai.OpenAI) -> None:
    only = {"allowed_token_ids": [97, 98], "return_token_ids": True}
    cut = complete(client, stop=["ab"], max_tokens=200, extra_body=only).choices[0]
    kept = complete(
        client, stop=["ab"], max_tokens=200, extra_body={**only, "include_stop_str_in_output": True}
    ).choices[0]
    assert kept.text == cut.text + "ab"


def test_prompts_are_scored_cut_and_continued(client: openai.OpenAI) -> None:
    scored = complete(client, extra_body={"prompt_logprobs": 2, "return_token_ids": True})
    rows = scored.choices[0].prompt_logprobs
    assert rows[0] is None
    assert len(rows) == 5
    assert all(str(token) in row for token, row in zip(b"ello", rows[1:], strict=True))
    assert all(2 <= len(row) <= 3 for row in rows[1:])
    short = complete(client, extra_body={"truncate_prompt_tokens": 2, "return_token_ids": True})
    assert bytes(short.choices[0].prompt_token_ids) == b"lo"
    going = [*CHAT, {"role": "assistant", "content": "Once upon"}]
    wish = {"continue_final_message": True, "add_generation_prompt": False}
    answer = ask(
        client, messages=going, max_tokens=4, extra_body={**wish, "return_token_ids": True}
    )
    assert bytes(answer.choices[0].prompt_token_ids[-9:]) == b"Once upon"


def test_what_harnesses_ask_of_a_server(service: ServiceProcess) -> None:
    assert service.get("/health").status_code == 200
    assert service.get("/version").json()["version"]
    found = service.post("/tokenize", {"model": "tiny", "prompt": "hello"}).json()
    assert found["tokens"] == list(b"hello")
    assert found["count"] == 5
    assert service.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "hello"}
    chat = service.post("/tokenize", {"messages": CHAT, "return_token_strs": True}).json()
    assert "".join(chat["token_strs"]).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("name", ["embeddings", "moderations"])
def test_other_apis_are_refused_by_name(service: ServiceProcess, name: str) -> None:
    answer = service.post(f"/v1/{name}", {"model": "tiny", "input": "hello"})
    assert answer.status_code == 400
    assert f"/v1/{name}" in answer.json()["error"]["message"]


def test_trained_weights_have_a_friendly_name(
    service: ServiceProcess, client: openai.OpenAI
) -> None:
    sdk = tinker.ServiceClient(base_url=service.url, api_key=service.key)
    training = sdk.create_lora_training_client(base_model="tiny", rank=2)
    path = training.save_weights_for_sampler("friendly").result().path
    cards = {model.id: model for model in client.models.list()}
    assert cards["tiny:friendly"].root == path
    assert path in cards
    assert complete(client, model="tiny:friendly").choices
    assert client.models.retrieve("tiny:friendly").id == "tiny:friendly"
    other = openai.OpenAI(base_url=f"{service.url}/v1", api_key=service.key_of("other"))
    with pytest.raises(openai.NotFoundError):
        complete(other, model="tiny:friendly")


def chat_ids(client: openai.OpenAI, messages: list[Any], **wishes: Any) -> tuple[Any, list[int]]:
    """The answer, and the tokens of its prompt and itself."""
    extra = {"continuous_tokens": True, "return_token_ids": True}
    answer = ask(client, messages=messages, max_tokens=12, extra_body=extra, **wishes)
    choice = answer.choices[0]
    return choice.message, [*choice.prompt_token_ids, *choice.token_ids]


def test_continuous_tokens_keep_what_was_sampled(client: openai.OpenAI) -> None:
    message, first = chat_ids(client, CHAT)
    assert "\ufffd" in message.content, "else its text might tokenize as it was sampled"
    longer = [*CHAT, message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
    _, second = chat_ids(client, longer)
    assert second[: len(first)] == first
    stream = ask(
        client, messages=longer, max_tokens=12, stream=True, extra_body={"continuous_tokens": True}
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    last = [*longer, {"role": "assistant", "content": said}, {"role": "user", "content": "!"}]
    _, third = chat_ids(client, last)
    assert third[: len(second)] == second, "the same seed gave the same answer"


def test_any_effort_is_taken_by_a_template_without_thoughts(client: openai.OpenAI) -> None:
    assert ask(client, reasoning_effort="low", max_tokens=4).choices


def test_a_response_is_the_chats_answer_in_another_form(client: openai.OpenAI) -> None:
    wishes: Any = {"model": "tiny", "max_output_tokens": 12, "extra_body": {"seed": 1}}
    given: Any = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    whole = client.responses.create(input=given, instructions="be short", **wishes)
    messages = [{"role": "system", "content": "be short"}, *CHAT]
    chat = ask(client, messages=messages, max_tokens=12)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage is not None and chat.usage is not None
    assert whole.usage.total_tokens == chat.usage.total_tokens
    assert whole.status == ("incomplete" if whole.usage.output_tokens == 12 else "completed")
    with client.responses.stream(input=given, instructions="be short", **wishes) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == whole.output_text
    assert events[0].type == "response.created"
    assert events[-1].type == f"response.{whole.status}"


def test_a_response_calls_functions_and_reads_what_they_returned(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA}
    wishes: Any = {"model": "tiny", "tools": [tool], "extra_body": {"seed": 1}}
    asked: Any = [{"role": "user", "content": "rain?"}]
    whole = client.responses.create(input=asked, tool_choice="required", **wishes)
    call = next(item for item in whole.output if item.type == "function_call")
    jsonschema_rs.validate(SCHEMA, json.loads(call.arguments))
    streamed = list(
        client.responses.create(input=asked, tool_choice="required", stream=True, **wishes)
    )
    done = [e for e in streamed if e.type == "response.function_call_arguments.done"]
    assert done[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}
    asked += [call.model_dump(), result]
    after = client.responses.create(input=asked, max_output_tokens=8, **wishes)
    assert after.usage is not None and after.usage.output_tokens > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("store", True),
        ("tools", [{"type": "web_search"}]),
        ("input", [{"type": "item_reference", "id": "x"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}]),
        ("input", [{"type": "function_call", "name": "f"}]),
        ("text", {"format": {"type": "nonsense"}}),
    ],
)
def test_what_responses_do_not_do_is_refused_by_its_name(
    client: openai.OpenAI, field: str, value: object
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(
            model="tiny", input="hello", max_output_tokens=4, extra_body={field: value}
        )
    assert {"text": "response_format"}.get(field, field) in refused.value.message
