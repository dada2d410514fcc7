"""dspy: a typed signature through its JSON adapter."""

import sys
from typing import Literal

import dspy

url, key, model = sys.argv[1:]


class ServedModel(dspy.LM):
    """dspy asks for a schema only of models in its own catalogue, which a served model is not."""

    supports_response_schema = True
    supported_params = frozenset({"response_format"})


lm = ServedModel(f"openai/{model}", api_base=f"{url}/v1", api_key=key, max_tokens=300, cache=False)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())


class Judge(dspy.Signature):
    """Say what it is."""

    question: str = dspy.InputField()
    kind: Literal["tide", "wave"] = dspy.OutputField()


found = dspy.Predict(Judge)(question="which is it?")
assert found.kind in ("tide", "wave"), found
print("dspy: a typed signature")
