"""Agent tools in an environment of the action service, in OpenAI's tool format.

    async with ActionClient(url, key) as actions, actions.environment() as environment:
        tools = Tools(environment)
        answer = openai.chat.completions.create(..., tools=tools.definitions())
        for call in answer.choices[0].message.tool_calls:
            messages.append(await tools.answer(call.model_dump()))

A model gets a readable answer to every mistake: a wrong name, invalid JSON, a path outside the home
folder, a failing command. None of them ends the trajectory.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from slackwater.rl.actions import ActionEnvironment, ActionOutcome

_MAX_CHARACTERS = 20_000
_LIMIT_S = 120.0


def _tool(name: str, description: str, **fields: str) -> dict[str, Any]:
    properties = {field: {"type": "string", "description": text} for field, text in fields.items()}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(fields),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


_DEFINITIONS = {
    "shell": _tool(
        "shell",
        "Run a command with sh in the sandbox, in its home folder. Files stay between calls; "
        "there is no network.",
        command="The command line.",
    ),
    "write_file": _tool(
        "write_file",
        "Write a text file in the sandbox, with the folders above it.",
        path="A path inside the home folder, such as src/main.py.",
        content="All of the file's text.",
    ),
    "read_file": _tool(
        "read_file", "Read a text file in the sandbox.", path="A path inside the home folder."
    ),
}


class Tools:
    """One environment's tools. Every action has the `action_fields`: limits, cores, priority."""

    def __init__(self, environment: ActionEnvironment, **action_fields: Any) -> None:
        self._environment = environment
        self._action_fields = {"limit_s": _LIMIT_S} | action_fields

    def definitions(self) -> Sequence[dict[str, Any]]:
        """For the `tools` of a chat completion."""
        return [dict(definition) for definition in _DEFINITIONS.values()]

    async def answer(self, tool_call: Mapping[str, Any]) -> dict[str, Any]:
        """The message that answers a tool call of an assistant's message."""
        function = tool_call["function"]
        _, text = await self.call(str(function["name"]), function.get("arguments") or "{}")
        return {"role": "tool", "tool_call_id": tool_call["id"], "content": text}

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> tuple[bool, str]:
        """Whether it succeeded, and the text for the model."""
        if name not in _DEFINITIONS:
            return False, f"error: there is no tool {name!r}; there are {', '.join(_DEFINITIONS)}"
        fields = _DEFINITIONS[name]["function"]["parameters"]["required"]
        try:
            values = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        except ValueError as error:
            return False, f"error: the arguments are no JSON: {error}"
        if not isinstance(values, dict) or sorted(values) != sorted(fields):
            return False, f"error: {name} takes exactly {', '.join(fields)}"
        if not all(isinstance(value, str) and "\0" not in value for value in values.values()):
            return False, f"error: {name} takes text without zero bytes"
        if name == "shell":
            outcome = await self._run("sh", "-c", values["command"])
            return outcome.ok, _format_result(outcome)
        path = PurePosixPath(values["path"])
        if path.is_absolute() or ".." in path.parts or not path.name:
            return False, "error: path must be inside the home folder, such as src/main.py"
        if name == "read_file":
            outcome = await self._run("cat", "--", str(path))
            return outcome.ok, _format_result(outcome)
        script = 'mkdir -p -- "$1" && cat > "$2"'
        outcome = await self._run(
            "sh", "-c", script, "sh", str(path.parent), str(path), stdin=values["content"]
        )
        return outcome.ok, _format_result(outcome) if not outcome.ok else f"wrote {path}"

    async def _run(self, *command: str, **fields: Any) -> ActionOutcome:
        return await self._environment.run(*command, kind="tool", **(self._action_fields | fields))


def _format_result(outcome: ActionOutcome) -> str:
    """An action's output, shortened in the middle, and how it ended if it failed."""
    text = outcome.stdout + outcome.stderr
    if len(text) > _MAX_CHARACTERS:
        half = _MAX_CHARACTERS // 2
        omitted = len(text) - _MAX_CHARACTERS
        text = f"{text[:half]}\n... {omitted} characters left out ...\n{text[-half:]}"
    if outcome.outcome != "done":
        return f"{text}\n({outcome.outcome}: {outcome.reason})".lstrip("\n")
    return text if outcome.status == 0 else f"{text}\n(exit status {outcome.status})".lstrip("\n")
