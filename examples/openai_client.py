"""Generate with the public OpenAI SDK against a running service, whole and streamed.

slackwater up                                   # in another terminal; prints a URL and a key
python examples/openai_client.py URL KEY
"""

import sys

from openai import OpenAI

url, key = sys.argv[1:3]
client = OpenAI(base_url=f"{url}/v1", api_key=key)
model = client.models.list().data[0].id
whole = client.completions.create(model=model, prompt="The tide", max_tokens=16, seed=1)
print("whole   ", repr(whole.choices[0].text))
parts = client.completions.create(
    model=model, prompt="The tide", max_tokens=16, seed=1, stream=True
)
streamed = "".join(part.choices[0].text for part in parts if part.choices)
print("streamed", repr(streamed))
assert streamed == whole.choices[0].text
