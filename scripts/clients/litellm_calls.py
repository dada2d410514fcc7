"""litellm: a completion, a stream, a tool call and structured output."""

import json
import sys

import litellm

url, key, model = sys.argv[1:]
to = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": key, "seed": 1}
asked = [{"role": "user", "content": "high or low?"}]
answer = litellm.completion(messages=asked, max_tokens=8, **to)
assert answer.usage.completion_tokens == 8, answer.usage
parts = list(litellm.completion(messages=asked, max_tokens=8, stream=True, **to))
text = "".join(part.choices[0].delta.content or "" for part in parts)
assert text == answer.choices[0].message.content, (text, answer)
schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
schema |= {"additionalProperties": False}
tool = {"type": "function", "function": {"name": "tide", "parameters": schema}}
called = litellm.completion(
    messages=asked, tools=[tool], tool_choice="required", max_tokens=200, **to
)
(call,) = called.choices[0].message.tool_calls[:1]
assert isinstance(json.loads(call.function.arguments)["sure"], bool), call
wanted = {"type": "json_schema", "json_schema": {"name": "v", "schema": schema, "strict": True}}
said = litellm.completion(messages=asked, response_format=wanted, max_tokens=200, **to)
assert isinstance(json.loads(said.choices[0].message.content)["sure"], bool), said
print("litellm: completion, stream, tool call, structured output")
