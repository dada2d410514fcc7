"""`slackwater eval`: how it calls a harness, and what it makes of the results."""

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slackwater.cli.eval import find_program, read_scores
from slackwater.model.errors import ConfigError, RefusedError

KEY = "tml-secret"
FILES = {
    "/v1/models": json.dumps({"data": [{"id": "acme/tiny"}, {"id": "acme/tiny:final"}]}),
    "/hub/acme/tiny/resolve/main/tokenizer.json": '{"version": "1.0"}',
}
# Stands for lm_eval: notes how it was called, and writes a result as lm-eval does.
HARNESS = """#!{python}
import json, os, pathlib, sys
pathlib.Path("called.json").write_text(json.dumps([sys.argv[1:], os.environ["OPENAI_API_KEY"]]))
given = sys.argv[sys.argv.index("--model_args") + 1].split(",")
arguments = dict(pair.split("=") for pair in given)
assert (pathlib.Path(arguments["tokenizer"]) / "tokenizer.json").is_file()
out = pathlib.Path(sys.argv[sys.argv.index("--output_path") + 1]) / "acme__tiny"
out.mkdir()
results = {{"sums": {{"alias": "sums", "acc,none": 0.25, "acc_stderr,none": 0.1}}}}
(out / "results_1.json").write_text(json.dumps({{"results": results}}))
print("a table for people")
sys.exit(3 if "--fail" in sys.argv else 0)
"""


@pytest.fixture
def address() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = FILES.get(self.path) if self.headers["x-api-key"] == KEY else None
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write((found or "{}").encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_lm_eval_is_run_on_the_services_endpoint_and_its_scores_are_printed(
    address: str, tmp_path: Path
) -> None:
    program = tmp_path / "lm_eval"
    program.write_text(HARNESS.format(python=sys.executable))
    program.chmod(0o755)
    command = [sys.executable, "-m", "slackwater", "eval", "sums", "--url", address]
    command += ["--program", str(program), "--json", "--limit", "7", "--num_fewshot", "2"]
    environment = {**os.environ, "TINKER_API_KEY": KEY}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "harness": "lm-eval",
        "model": "acme/tiny",
        "results": {"sums": {"acc": 0.25, "acc_stderr": 0.1}},
    }
    arguments, key = json.loads((tmp_path / "called.json").read_text())
    assert key == KEY and not any(KEY in argument for argument in arguments)
    assert arguments[:5] == ["run", "--model", "local-completions", "--tasks", "sums"]
    assert f"base_url={address}/v1/completions" in ",".join(arguments)
    assert arguments[-2:] == ["--num_fewshot", "2"], "what is not ours goes to the harness"
    assert arguments[arguments.index("--limit") + 1] == "7"
    failed = subprocess.run(
        [*command, "--fail"], cwd=tmp_path, env=environment, capture_output=True, timeout=240
    )
    assert failed.returncode == 1 and not failed.stdout


def test_a_harness_that_is_missing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(RefusedError, match="inspect is not installed; pip install"):
        find_program("inspect", None)
    with pytest.raises(ConfigError, match="--program: 'nowhere' is not a program"):
        find_program("lm-eval", "nowhere")


def test_the_scores_of_inspect_are_read_from_its_logs(tmp_path: Path) -> None:
    log = {
        "eval": {"task": "sums"},
        "results": {"scores": [{"name": "match", "metrics": {"accuracy": {"value": 0.5}}}]},
    }
    (tmp_path / "log.json").write_text(json.dumps(log))
    assert read_scores("inspect", [tmp_path / "log.json"]) == {"sums": {"match/accuracy": 0.5}}
