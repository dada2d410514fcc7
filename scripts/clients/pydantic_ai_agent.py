"""pydantic-ai: an agent that answers with a type, and a stream."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, key, model = sys.argv[1:]
llm = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))
settings = {"max_tokens": 200, "seed": 1}


class Verdict(BaseModel):
    sure: bool
    kind: Literal["tide", "wave"]


for output in (ToolOutput(Verdict), NativeOutput(Verdict)):
    agent = Agent(llm, output_type=output, model_settings=settings)
    assert isinstance(agent.run_sync("which is it?").output, Verdict), output


async def streamed() -> str:
    async with Agent(llm, model_settings=settings | {"max_tokens": 8}).run_stream("?") as stream:
        return str(await stream.get_output())


assert asyncio.run(streamed())
print("pydantic-ai: typed answers by tool and schema, a stream")
