"""`slackwater eval`: run lm-eval or inspect-ai against a service's OpenAI API."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from slackwater.cli.running_service import AsJson, Key, State, Url
from slackwater.cli.up_options import DEFAULT_STATE
from slackwater.model.errors import ConfigError, RefusedError

app = typer.Typer(add_completion=False)
Harness = Literal["lm-eval", "inspect"]
_PROGRAMS = {"lm-eval": "lm_eval", "inspect": "inspect"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def evaluate(
    ctx: typer.Context,
    tasks: Annotated[str, typer.Argument(help="Tasks of the harness, separated by commas.")],
    model: Annotated[
        str | None, typer.Option(help="Base model or tinker:// path. Default: the only base model.")
    ] = None,
    harness: Annotated[Harness, typer.Option(help="lm-eval or inspect.")] = "lm-eval",
    chat: Annotated[bool, typer.Option("--chat", help="lm-eval: use chat completions.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Samples per task. Default: all.")
    ] = None,
    concurrent: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 8,
    program: Annotated[
        str | None,
        typer.Option(help="Path of the harness's program, if it is in another environment."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the harness's results.")] = None,
    url: Url = None,
    key: Key = None,
    state: State = DEFAULT_STATE,
    as_json: AsJson = False,
) -> int:
    """Evaluate a served model; other options are passed to the harness."""
    from slackwater.cli.running_service import ServiceClient, find_service

    command = find_program(harness, program)
    address, secret = find_service(url, key, state)
    client = ServiceClient(address, secret, timeout_s=60)
    named = model or only_model(client)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slackwater-eval-")))
        results = (output or scratch / "results").absolute()
        results.mkdir(parents=True, exist_ok=True)
        before = set(results.rglob("*.json"))
        if harness == "lm-eval":
            tokenizer = fetch_tokenizer(client, named, scratch / "tokenizer")
            command += lm_eval_options(tasks, named, address, tokenizer, chat, concurrent)
            command += [] if limit is None else ["--limit", str(limit)]
            command += ["--output_path", str(results)]
        else:
            command += ["eval", *tasks.split(","), "--model", f"openai-api/service/{named}"]
            command += ["--model-base-url", f"{address}/v1", "--max-connections", str(concurrent)]
            command += [] if limit is None else ["--limit", str(limit)]
            command += ["--log-dir", str(results), "--log-format", "json"]
        secrets = {"OPENAI_API_KEY": secret, "SERVICE_API_KEY": secret}  # not on a command line
        shown = sys.stderr if as_json else None
        done = subprocess.run([*command, *ctx.args], env=os.environ | secrets, stdout=shown)
        if done.returncode:
            raise RefusedError(f"{harness} failed with status {done.returncode}; see above")
        if as_json:
            found = sorted(set(results.rglob("*.json")) - before)
            scores = read_scores(harness, found)
            print(json.dumps({"harness": harness, "model": named, "results": scores}))
    return 0


def find_program(harness: str, given: str | None) -> list[str]:
    """The harness as a command: the given program, one beside this Python, or on the path."""
    name = _PROGRAMS[harness]
    beside = str(Path(sys.executable).parent)
    found = shutil.which(given or name, path=None if given else f"{beside}:{os.environ['PATH']}")
    if found is None:
        if given:
            raise ConfigError.of("--program", given, "is not a program")
        fix = "pip install -c constraints.txt '.[eval]', or name it with --program"
        raise RefusedError(f"{name} is not installed; {fix}")
    return [found]


def only_model(client: Any) -> str:
    names = [str(item["id"]) for item in client.ask("GET", "/v1/models")["data"]]
    bases = [name for name in names if ":" not in name]
    if len(bases) != 1:
        raise ConfigError(f"--model: is required; one of {', '.join(bases or names)}")
    return bases[0]


def fetch_tokenizer(client: Any, model: str, folder: Path) -> Path:
    """Download the model's tokenizer: lm-eval counts and cuts contexts with it."""
    base = model
    if model.startswith("tinker://"):
        base = client.ask("POST", "/api/v1/weights_info", {"tinker_path": model})["base_model"]
    base = base.partition(":")[0]
    folder.mkdir()
    for name in _TOKENIZER_FILES:
        answer = client.send("GET", f"/hub/{base}/resolve/main/{name}")
        if answer.status_code == 200:
            (folder / name).write_bytes(answer.content)
    if not (folder / "tokenizer.json").is_file():
        raise RefusedError(f"the service has no tokenizer of {base}; lm-eval needs it")
    return folder


def lm_eval_options(
    tasks: str, model: str, address: str, tokenizer: Path, chat: bool, concurrent: int
) -> list[str]:
    """lm-eval's own options for an OpenAI endpoint."""
    path = "chat/completions" if chat else "completions"
    arguments = {
        "model": model,
        "base_url": f"{address}/v1/{path}",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(tokenizer),
        "num_concurrent": str(concurrent),
        "max_retries": "3",
    }
    kind = "local-chat-completions" if chat else "local-completions"
    options = ["run", "--model", kind, "--tasks", tasks, "--batch_size", "1"]
    options += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    return [*options, "--apply_chat_template"] if chat else options


def read_scores(harness: str, files: list[Path]) -> dict[str, dict[str, float]]:
    """Each task's metrics from the harness's result files."""
    scores: dict[str, dict[str, float]] = {}
    for file in files:
        written = json.loads(file.read_text())
        if harness == "lm-eval":
            for task, metrics in written.get("results", {}).items():
                numbers = {k: v for k, v in metrics.items() if isinstance(v, (int, float))}
                scores[task] = {name.removesuffix(",none"): v for name, v in numbers.items()}
        elif isinstance(written, dict) and "eval" in written:
            scored = (written.get("results") or {}).get("scores") or ()
            scores[str(written["eval"]["task"])] = {
                f"{score['name']}/{name}": float(metric["value"])
                for score in scored
                for name, metric in score["metrics"].items()
            }
    return scores
