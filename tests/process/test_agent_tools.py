"""Models that use a sandbox: OpenAI's tool calls and the Model Context Protocol by their own
clients, and a recipe that trains on it.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest

from harness.ports import free_port
from slackwater.rl.actions import ActionClient
from slackwater.rl.tools import Tools

from .action_service import ActionServiceProcess
from .service_process import wait_for

pytestmark = pytest.mark.process

T = TypeVar("T")
WITHIN_S = 240.0


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[ActionServiceProcess]:
    state = tmp_path_factory.mktemp("tools") / "state"
    service = ActionServiceProcess(
        state,
        free_port(),
        "auto",
        "--engines",
        "1",
        "--trainers",
        "1",
        "--model",
        f"tiny={tiny_model}",
    )
    service.start()
    yield service
    service.remove()


def with_tools(service: ActionServiceProcess, work: Callable[[Tools], Awaitable[T]]) -> T:
    async def run() -> T:
        async with (
            ActionClient(service.url, service.key, job="agent") as actions,
            actions.environment(memory_mib=64) as place,
        ):
            return await work(Tools(place))

    return asyncio.run(asyncio.wait_for(run(), WITHIN_S))


def environments(service: ActionServiceProcess) -> list[Any]:
    found: list[Any] = service.get("/slackwater/environments").json()["environments"]
    return found


def test_what_a_model_calls_is_run_and_answered(service: ActionServiceProcess) -> None:
    """The model is random: that it calls at all is the grammar's doing, what it asks for is
    noise.
    """
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    named: Any = {"type": "function", "function": {"name": "shell"}}

    async def converse(tools: Tools) -> dict[str, Any]:
        client = openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key=service.key)
        offered: Any = tools.definitions()[:1]  # a tiny model has room for one
        ending = {str(ord(sign)): 6 for sign in '"}'}
        asked = await client.chat.completions.create(
            model="tiny", messages=messages, tools=offered, tool_choice=named, max_tokens=200,
            seed=1, logit_bias=ending,
        )  # fmt: skip
        assert asked.choices[0].message.tool_calls is not None
        call = asked.choices[0].message.tool_calls[0].model_dump()
        heard = await tools.answer(call)
        messages.extend([{"role": "assistant", "content": None, "tool_calls": [call]}, heard])
        again = await client.chat.completions.create(
            model="tiny", messages=messages, tools=offered, max_tokens=4, seed=1
        )
        assert again.choices[0].message is not None
        await client.close()
        return heard | {"asked_by": call["id"]}

    heard = with_tools(service, converse)
    assert heard["role"] == "tool"
    assert heard["tool_call_id"] == heard["asked_by"]


def test_calls_work_on_one_environment_and_bad_ones_are_told_what_is_wrong(
    service: ActionServiceProcess,
) -> None:
    async def work(tools: Tools) -> list[tuple[bool, str]]:
        return [
            await tools.call("write_file", {"path": "a/b.txt", "content": "one\ntwo\n"}),
            await tools.call("shell", '{"command": "wc -l < a/b.txt; exit 3"}'),
            await tools.call("read_file", {"path": "a/b.txt"}),
            await tools.call("read_file", {"path": "../../etc/passwd"}),
            await tools.call("shell", "{"),
            await tools.call("shell", {"command": 3}),
            await tools.call("fly", {}),
        ]

    said = with_tools(service, work)
    assert said[0] == (True, "wrote a/b.txt")
    assert said[1] == (False, "2\n\n(exit status 3)")
    assert said[2] == (True, "one\ntwo\n")
    assert said[3] == (False, "error: path must be inside the home folder, such as src/main.py")
    assert said[4][1].startswith("error: the arguments are no JSON")
    assert said[5] == (False, "error: shell takes text without zero bytes")
    assert said[6][1].startswith("error: there is no tool 'fly'; there are shell")


def test_an_mcp_client_works_in_a_sandbox_of_its_own(
    service: ActionServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mcp import Client, MCPError, StdioServerParameters, types

    # The client kills a server that takes longer to end, and a busy machine needs longer than its
    # two seconds.
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 60.0)
    command = ["-m", "slackwater", "action", "mcp", "--url", service.url]
    known = os.environ | {"TINKER_API_KEY": service.key}
    server = StdioServerParameters(command=sys.executable, args=command, env=dict(known))

    async def session() -> None:
        async with Client(server) as client:
            found = await client.list_tools()
            assert [tool.name for tool in found.tools] == ["shell", "write_file", "read_file"]
            wrote = await client.call_tool("write_file", {"path": "x.txt", "content": "kept"})
            assert not wrote.is_error
            ran = await client.call_tool("shell", {"command": "cat x.txt; false"})
            (text,) = ran.content
            assert isinstance(text, types.TextContent)
            assert (ran.is_error, text.text) == (True, "kept\n(exit status 1)")
            with pytest.raises(MCPError, match="there is no tool 'fly'"):
                await client.call_tool("fly", {})
            assert len(environments(service)) == 1

    asyncio.run(asyncio.wait_for(session(), WITHIN_S))
    wait_for("its sandbox to be gone", lambda: environments(service) == [])


def test_the_cookbooks_code_tool_and_reward_run_their_tests_through_the_broker(
    service: ActionServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinker_cookbook.recipes.code_rl import code_grading
    from tinker_cookbook.recipes.code_rl.deepcoder_tool import DeepcoderReward, DeepcoderTask
    from tinker_cookbook.renderers.base import Message
    from tinker_cookbook.sandbox import SandboxFusionClient

    tests = {"inputs": ["2\n3\n", "5\n5\n"], "outputs": ["5\n", "10\n"]}
    task = DeepcoderTask("Add two numbers.", code_grading.taco_to_lcb_format(tests))
    right = "print(int(input()) + int(input()))"
    address = service.url.replace("://", f"://any:{service.key}@") + "/slackwater/run_code"

    async def graded() -> None:
        client = SandboxFusionClient(address)
        monkeypatch.setattr(code_grading, "_sandboxfusion_client", client)
        reward = DeepcoderReward(task, timeout=60)  # six are few on a busy machine
        for code, correct in ((right, 1.0), ("print(5)", 0.0), ("import nothing_such", 0.0)):
            answer = Message(role="assistant", content=f"So:\n```python\n{code}\n```")
            assert (await reward([answer]))[1] == {"format": 1.0, "correct": correct}
        passed, told = await client.run("import time; time.sleep(60)", {}, timeout=1)
        assert (passed, told["run_result"]["status"]) == (False, "TimeLimitExceeded")
        passed, told = await client.run("echo $((6 * 7))", {}, timeout=60, language="bash")
        assert (passed, told["run_result"]["stdout"]) == (True, "42\n")
        await client.close()

    asyncio.run(graded())
    assert environments(service) == []
    asked = service.post("/slackwater/run_code", {"code": "1", "files": {"a": "no base64!"}})
    assert asked.status_code == 422


def test_a_recipe_trains_on_what_its_programs_do_in_the_sandbox(
    service: ActionServiceProcess, tmp_path: Path
) -> None:
    run, size = tmp_path / "coding", {"steps": 2, "groups": 2, "max_groups": 2, "group_size": 4}
    command = [sys.executable, "-m", "slackwater", "train", "coding", "--run", str(run)]
    command += ["--url", service.url, "--key", service.key, "--set", "warm_up.steps=4"]
    command += ["--set", "environment.own_environment=true"]
    for name, value in size.items():
        command += ["--set", f"grpo.{name}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == size["steps"]
    trajectories = size["groups"] * size["group_size"]
    turns = sum(round(row["answer/turns"] * trajectories) for row in rows)
    ended = [
        one
        for one in service.get("/slackwater/actions").json()["ended"]
        if one["command"] == "sh tests.sh"
    ]
    assert len(ended) == turns >= size["steps"] * trajectories
    assert {one["kind"] for one in ended} == {"done"}
    assert environments(service) == []
