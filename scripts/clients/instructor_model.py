"""instructor: a typed answer by a tool call and by a JSON schema."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

url, key, model = sys.argv[1:]


class Verdict(BaseModel):
    sure: bool
    kind: Literal["tide", "wave"]


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=key), mode=mode)
    verdict = client.chat.completions.create(
        model=model,
        response_model=Verdict,
        messages=[{"role": "user", "content": "which is it?"}],
        max_tokens=200,
        seed=1,
        max_retries=1,
    )
    assert isinstance(verdict, Verdict), (mode, verdict)
print("instructor: tools and JSON schema")
