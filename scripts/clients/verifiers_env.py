"""verifiers: an environment with a tool, rolled out against the service."""

import asyncio
import os
import sys

import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig

url, key, model = sys.argv[1:]
os.environ["SERVICE_KEY"] = key
client = ClientConfig(api_base_url=f"{url}/v1", api_key_var="SERVICE_KEY")
data = Dataset.from_list(
    [{"question": "2 + 3?", "answer": "5"}, {"question": "1 + 1?", "answer": "2"}]
)


def right(completion: list, answer: str) -> float:
    return float(answer in str(completion[-1]["content"]))


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


rubric = vf.Rubric(funcs=[right])
settings = {"max_tokens": 48, "temperature": 1.0}
for env in (
    vf.SingleTurnEnv(dataset=data, rubric=rubric),
    vf.ToolEnv(dataset=data, rubric=rubric, tools=[add], max_turns=2),
):
    found = asyncio.run(
        env.evaluate(client, model, sampling_args=settings, num_examples=2, rollouts_per_example=2)
    )
    outputs = found["outputs"] if "outputs" in found else found["reward"]
    assert len(outputs) == 4, found
print("verifiers: single turn, tools")
