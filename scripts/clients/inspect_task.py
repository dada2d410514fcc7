"""inspect-ai: a small task with a tool against the service, scored."""

import os
import sys
import tempfile

url, key, model = sys.argv[1:]
os.environ |= {"OPENAI_API_KEY": key, "OPENAI_BASE_URL": f"{url}/v1"}

from inspect_ai import Task, eval  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import GenerateConfig, ResponseSchema  # noqa: E402
from inspect_ai.scorer import includes, match  # noqa: E402
from inspect_ai.solver import generate, use_tools  # noqa: E402
from inspect_ai.tool import tool  # noqa: E402
from inspect_ai.util import json_schema  # noqa: E402
from pydantic import BaseModel  # noqa: E402


@tool
def add():
    async def execute(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return str(a + b)

    return execute


class Answer(BaseModel):
    yes: bool


samples = [Sample(input="2 + 3?", target="5"), Sample(input="1 + 1?", target="2")]
form = ResponseSchema(name="answer", json_schema=json_schema(Answer))
tasks = [
    Task(samples, solver=generate(), scorer=match(), config=GenerateConfig(max_tokens=16)),
    Task(
        samples,
        solver=[use_tools(add()), generate(tool_calls="single")],
        scorer=includes(),
        config=GenerateConfig(max_tokens=64),
    ),
    Task(
        samples,
        solver=generate(),
        scorer=includes(),
        config=GenerateConfig(max_tokens=64, response_schema=form, logprobs=True, top_logprobs=2),
    ),
]
with tempfile.TemporaryDirectory() as logs:
    for log in eval(
        tasks,
        model=f"openai-api/service/{model}",
        model_base_url=f"{url}/v1",
        model_args={"api_key": key},
        log_dir=logs,
        display="none",
    ):
        assert log.status == "success", log.error
        assert len(log.samples) == 2
print("inspect-ai: plain, with a tool, with a schema")
