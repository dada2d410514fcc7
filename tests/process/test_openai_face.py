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
        ("reasoning_effort", "high"),
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


@pytest.mark.parametrize("name", ["responses", "embeddings", "moderations"])
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
