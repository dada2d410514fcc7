"""Body of SandboxFusion's `run_code`, in a small module because helper processes import it."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from slackwater.serve.tinker.bodies import Finite, RequestBody


class RunCodeBody(RequestBody):
    """`files` are base64; SandboxFusion's other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    code: str
    language: Literal["python", "bash"] = "python"
    run_timeout: Annotated[Finite, Field(gt=0, le=3600)] = 10.0
    stdin: str | None = None
    files: dict[str, str | None] = Field(default_factory=dict)
    memory_limit_MB: Annotated[int, Field(ge=-1, le=1 << 20)] = -1  # noqa: N815  (the API's name)
