"""langchain-openai: an agent with a tool, structured output both ways, and a stream."""

import sys
from typing import Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url, key, model = sys.argv[1:]
llm = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=key, max_tokens=300, seed=1)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Verdict(BaseModel):
    sure: bool
    kind: Literal["tide", "wave"]


called = llm.bind_tools([add], tool_choice="required", parallel_tool_calls=False)
calls = called.invoke("2 + 3?").tool_calls
assert calls[0]["name"] == "add", calls
assert isinstance(add.invoke(calls[0]["args"]), int)
for method in ("json_schema", "function_calling"):
    verdict = llm.with_structured_output(Verdict, method=method).invoke("which is it?")
    assert isinstance(verdict, Verdict), (method, verdict)
chunks = list(called.stream("2 + 3?"))
assert sum((chunk for chunk in chunks[1:]), chunks[0]).tool_calls[0]["name"] == "add"
limit = ModelCallLimitMiddleware(run_limit=3, exit_behavior="end")
agent = create_agent(llm, [add], middleware=[limit])
messages = agent.invoke({"messages": [("user", "What is 2 + 3?")]})["messages"]
assert messages[-1].type == "ai", messages
print("langchain-openai: calls, structured output, stream, agent")
