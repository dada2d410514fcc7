"""Agent tools in an environment of the action service, in OpenAI's tool format.

    async with ActionClient(url, key) as actions, actions.environment() as place:
        tools = Tools(place)
        answer = openai.chat.completions.create(..., tools=tools.definitions())
        for call in answer.choices[0].message.tool_calls:
            messages.append(await tools.answer(call.model_dump()))

Every mistake of a model gets a readable answer: a wrong name, invalid JSON, a path that leads out,
a failing command. None of them ends the trajectory.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from slackwater.rl.actions import ActionEnvironment, ActionOutcome

_MOST_SHOWN = 20_000
_LIMIT_S = 120.0


def _tool(name: str, what: str, **fields: str) -> dict[str, Any]:
    properties = {field: {"type": "string", "description": text} for field, text in fields.items()}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(fields),
        "additionalProperties": False,
    }
    function = {"name": name, "description": what, "parameters": parameters}
    return {"type": "function", "function": function}


_DEFINITIONS = (
    _tool(
        "shell",
        "Run a command with sh in the sandbox, in its home folder. Files stay between calls; "
        "there is no network.",
        command="The command line.",
    ),
    _tool(
        "write_file",
        "Write a text file in the sandbox, with the folders above it.",
        path="A path inside the home folder, such as src/main.py.",
        content="All of the file's text.",
    ),
    _tool("read_file", "Read a text file in the sandbox.", path="A path inside the home folder."),
)


class Tools:
    """The tools of one environment. `given` goes with every action: limits, cores, priority."""

    def __init__(self, place: ActionEnvironment, **given: Any) -> None:
        self._place = place
        self._given = {"limit_s": _LIMIT_S} | given

    def definitions(self) -> Sequence[dict[str, Any]]:
        """For the `tools` of a chat completion."""
        return [dict(one) for one in _DEFINITIONS]

    async def answer(self, tool_call: Mapping[str, Any]) -> dict[str, Any]:
        """The message that answers a tool call of an assistant's message."""
        function = tool_call["function"]
        _, said = await self.call(str(function["name"]), function.get("arguments") or "{}")
        return {"role": "tool", "tool_call_id": tool_call["id"], "content": said}

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> tuple[bool, str]:
        """Whether it succeeded, and the text for the model."""
        fields = next(
            (
                one["function"]["parameters"]["required"]
                for one in _DEFINITIONS
                if one["function"]["name"] == name
            ),
            None,
        )
        if fields is None:
            known = ", ".join(one["function"]["name"] for one in _DEFINITIONS)
            return False, f"error: there is no tool {name!r}; there are {known}"
        try:
            given = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        except ValueError as error:
            return False, f"error: the arguments are no JSON: {error}"
        if not isinstance(given, dict) or sorted(given) != sorted(fields):
            return False, f"error: {name} takes exactly {', '.join(fields)}"
        if not all(isinstance(value, str) and "\0" not in value for value in given.values()):
            return False, f"error: {name} takes text without zero bytes"
        if name == "shell":
            ran = await self._run("sh", "-c", given["command"])
            return ran.ok, _told(ran)
        path = PurePosixPath(given["path"])
        if path.is_absolute() or ".." in path.parts or not path.name:
            return False, "error: path must be inside the home folder, such as src/main.py"
        if name == "read_file":
            ran = await self._run("cat", "--", str(path))
            return ran.ok, _told(ran)
        script = 'mkdir -p -- "$1" && cat > "$2"'
        ran = await self._run(
            "sh", "-c", script, "sh", str(path.parent), str(path), stdin=given["content"]
        )
        return ran.ok, _told(ran) if not ran.ok else f"wrote {path}"

    async def _run(self, *command: str, **given: Any) -> ActionOutcome:
        return await self._place.run(*command, kind="tool", **(self._given | given))


def _told(ran: ActionOutcome) -> str:
    """Its output, shortened in the middle, and its end if it failed."""
    said = ran.stdout + ran.stderr
    if len(said) > _MOST_SHOWN:
        half = _MOST_SHOWN // 2
        left_out = len(said) - _MOST_SHOWN
        said = f"{said[:half]}\n... {left_out} characters left out ...\n{said[-half:]}"
    if ran.outcome != "done":
        return f"{said}\n({ran.outcome}: {ran.reason})".lstrip("\n")
    return said if ran.status == 0 else f"{said}\n(exit status {ran.status})".lstrip("\n")
