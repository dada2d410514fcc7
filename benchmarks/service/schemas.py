"""Answers of a given form: the official JSON Schema test suite's schemas through `response_format`.

A tiny random model answers by every schema that the service takes; each answer is checked by a
validator that the service does not use. A schema that it does not take must be refused in words
that say why. The suite comes out of the sdist of the `jsonschema` package, or from `--data` (a
folder that holds `tests/draft2020-12`).
"""

import asyncio
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs

from benchmarks.options import BenchOptions
from slackwater.cli.own_service import own_service
from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.zoo.tiny import make_model

PACKAGE = "jsonschema==4.26.0"
SCHEMAS, QUICK_SCHEMAS = 500, 40
_DRAFTS = ("draft2020-12", "draft7", "draft2019-09", "draft6", "draft4")
_VALIDATORS = {
    "draft2020-12": jsonschema_rs.Draft202012Validator,
    "draft2019-09": jsonschema_rs.Draft201909Validator,
    "draft7": jsonschema_rs.Draft7Validator,
    "draft6": jsonschema_rs.Draft6Validator,
    "draft4": jsonschema_rs.Draft4Validator,
}
_CLIENTS = 16
_MAX_TOKENS = 900
# A random model has no wish to end a string, a number or a list: it is given one.
_ENDING = {str(ord(sign)): 5.0 for sign in '"}],'} | {"258": 5.0}


@dataclass(frozen=True, slots=True)
class SuiteSchema:
    """One schema of the suite, and the draft that it is written in."""

    draft: str
    schema: Any


def run(options: BenchOptions) -> dict[str, object]:
    """Ask once for every schema; count valid, refused, cut and wrong answers."""
    with tempfile.TemporaryDirectory(prefix="slackwater-") as scratch:
        folder = Path(scratch)
        tests = _suite(options, folder)
        most = QUICK_SCHEMAS if options.quick else SCHEMAS
        every = list(read_suite(tests))
        schemas = every[:: max(len(every) // most, 1)][:most] if options.quick else every[:most]
        make_model("tiny", folder / "tiny", options.seed)
        options.progress("starting a service", 0.1)
        with own_service(folder / "service", "tiny", folder / "tiny") as (url, key):
            began_s = time.perf_counter()
            found = asyncio.run(_ask_all(url, key, schemas, options))
            elapsed_s = time.perf_counter() - began_s
    kinds = Counter(kind for kind, _ in found)
    wrong = [said for kind, said in found if kind == "wrong"]
    return {
        "schemas": len(schemas),
        "valid": kinds["valid"],
        "refused_by_name": kinds["refused"],
        "cut_by_length": kinds["cut"],
        "wrong": kinds["wrong"],
        "first_wrong": wrong[0] if wrong else None,
        "answered_share": kinds["valid"] / max(len(schemas), 1),
        "seconds": elapsed_s,
    }


def read_suite(tests: Path) -> Iterator[SuiteSchema]:
    """Every schema once, newest draft first."""
    seen: set[str] = set()
    for draft in _DRAFTS:
        for file in sorted((tests / draft).glob("*.json")):
            for group in json.loads(file.read_text()):
                schema = group["schema"]
                plain = schema
                if isinstance(schema, dict):
                    plain = {key: value for key, value in schema.items() if key != "$schema"}
                text = json.dumps(plain, sort_keys=True)
                if text not in seen:
                    seen.add(text)
                    yield SuiteSchema(draft, schema)


async def _ask_all(
    url: str, key: str, schemas: list[SuiteSchema], options: BenchOptions
) -> list[tuple[str, str]]:
    gate, done = asyncio.Semaphore(_CLIENTS), 0
    async with httpx.AsyncClient(headers={"x-api-key": key}, timeout=600) as client:

        async def ask(asked: SuiteSchema) -> tuple[str, str]:
            nonlocal done
            async with gate:
                answer = await client.post(f"{url}/v1/chat/completions", json=_body(asked, options))
            done += 1
            options.progress(f"{done} of {len(schemas)}", 0.1 + 0.9 * done / len(schemas))
            return judge(asked, answer.status_code, answer.json())

        return await asyncio.gather(*[ask(schema) for schema in schemas])


def _body(asked: SuiteSchema, options: BenchOptions) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "?"}],
        "max_tokens": _MAX_TOKENS,
        "seed": options.seed,
        "logit_bias": _ENDING,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": asked.schema, "strict": True},
        },
    }


def judge(asked: SuiteSchema, status: int, answer: dict[str, Any]) -> tuple[str, str]:
    """valid, refused, cut (by its length) or wrong; and what was said."""
    if status != 200:
        said = str(answer.get("error", {}).get("message", answer))
        named = status == 400 and "schema" in said
        return ("refused", said) if named else ("wrong", f"{status}: {said}")
    choice = answer["choices"][0]
    text = choice["message"]["content"]
    if choice["finish_reason"] == "length":
        return "cut", text
    shown = f"{json.dumps(asked.schema)[:300]} gave {text[:200]!r}"
    try:
        _VALIDATORS[asked.draft](asked.schema).validate(json.loads(text, parse_float=Decimal))
    except (ValueError, jsonschema_rs.ValidationError) as error:
        return "wrong", f"{shown}: {error}"
    return "valid", text


def _suite(options: BenchOptions, scratch: Path) -> Path:
    """The folder that holds a folder for each draft."""
    if options.data is not None:
        for place in (options.data / "tests", options.data / "json" / "tests"):
            if (place / _DRAFTS[0]).is_dir():
                return place
        fix = f"must be a folder that holds tests/{_DRAFTS[0]}"
        raise ConfigError.of("--data", str(options.data), fix)
    options.progress(f"downloading {PACKAGE}", 0.0)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", "jsonschema", "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    archives = list(scratch.glob("jsonschema-*.tar.gz"))
    if done.returncode or not archives:
        raise UnavailableError(
            f"pip could not download {PACKAGE}; bring its sdist unpacked and pass --data"
        )
    with tarfile.open(archives[0]) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not there before 3.11.4
        archive.extractall(scratch)
    return next(scratch.glob("jsonschema-*/json/tests"))
