"""SGLang's HTTP API as 0.5.23 answers it, without a model: a recorded contract.

It takes exactly the routes and fields that SGLang has and refuses everything else. A token is a
hash of the loaded weights, the adapter, the seed and all tokens before it, so whoever knows the
files of a version can tell its tokens from every other's.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors.numpy import load_file

VOCABULARY = 250
# The fields of a request that we may send, and what SGLang makes of one that is left out.
_GENERATE = {
    "rid": None,
    "input_ids": None,
    "sampling_params": None,
    "return_logprob": False,
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "stream": False,
    "lora_path": None,
}
_PARAMS = {
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "min_new_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "sampling_seed",
    "stop_token_ids", "stop", "no_stop_trim", "ignore_eos", "skip_special_tokens",
    "logit_bias", "json_schema", "regex", "ebnf",
}  # fmt: skip


def fingerprint(directory: Path) -> str:
    """What the tensors of a directory are; a tied head is not one of them."""
    (file,) = directory.glob("*.safetensors")
    found = hashlib.sha256()
    for name, tensor in sorted(load_file(file).items()):
        if name != "lm_head.weight":
            found.update(name.encode() + tensor.tobytes())
    return found.hexdigest()


def next_token(weights: str, adapter: str, seed: int, tokens: Sequence[int]) -> int:
    """The token that follows; it depends on seed and position, not on where the prompt ends."""
    text = f"{weights} {adapter} {seed} {list(tokens)}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) % VOCABULARY


def continued(
    weights: str, adapter: str, seed: int, prompt: Sequence[int], count: int
) -> list[int]:
    """The whole answer."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(weights, adapter, seed, tokens))
    return tokens[len(prompt) :]


def logprob_of(token: int) -> float:
    return -(token + 1) / 64


class SglangContract:
    """The server; `calls` are the changes it was asked for, in order."""

    def __init__(self, model: Path, *, incremental: bool = True, pace_s: float = 0.001) -> None:
        self.model = model
        self.weights = fingerprint(model)
        self.weight_version = "default"
        self.incremental = incremental
        self.pace_s = pace_s
        self.adapters: dict[str, str] = {}
        self.running: dict[str, asyncio.Event] = {}  # of requests; set: aborted
        self._ended: dict[str, asyncio.Event] = {}
        self.calls: list[str] = []
        self.updating = self.asleep = self.refuses_to_sleep = False
        self._resumed = asyncio.Event()
        self._resumed.set()
        self.url = ""

    @asynccontextmanager
    async def serving(self, port: int) -> AsyncIterator["SglangContract"]:
        app = web.Application(client_max_size=64 << 20)
        posts = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/load_lora_adapter": self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/begin_weight_update": self._begin,
            "/update_weights_from_disk": self._update,
            "/end_weight_update": self._end,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
        }
        gets = {
            "/health": self._health,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/models": self._models,
        }

        async def openapi(_: web.Request) -> web.Response:
            return web.json_response({"paths": {path: {} for path in [*posts, *gets]}})

        app.add_routes([web.post(path, handler) for path, handler in posts.items()])
        app.add_routes([web.get(path, handler) for path, handler in gets.items()])
        app.add_routes([web.get("/openapi.json", openapi)])
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    # ---- what it says of itself ----
    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, _: web.Request) -> web.Response:
        info = {"model_path": str(self.model), "weight_version": self.weight_version}
        return web.json_response(info | {"is_generation": True})

    async def _server_info(self, _: web.Request) -> web.Response:
        info: dict[str, Any] = {"enable_lora": True, "max_total_num_tokens": 4096}
        info["incremental_streaming_output"] = self.incremental
        info |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        return web.json_response(info)

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": str(self.model), "root": str(self.model), "max_model_len": 512}
        return web.json_response({"data": [card]})

    # ---- generation ----
    async def _generate(self, request: web.Request) -> web.StreamResponse:
        assert not self.asleep, "a request while asleep"
        body = _GENERATE | await _body(request, set(_GENERATE))
        params = body["sampling_params"]
        if unknown := set(params) - _PARAMS:
            raise _refused(f"Unexpected sampling parameters {sorted(unknown)}")
        prompt, adapter = body["input_ids"], ""
        if any(not 0 <= token < VOCABULARY + 10 for token in prompt):
            raise _refused("input_ids out of the vocabulary")
        if body["lora_path"] is not None:
            if body["lora_path"] not in self.adapters:
                raise _refused(f"The following requested LoRA adapters are not loaded: {body}")
            adapter = self.adapters[body["lora_path"]]
        if not body["stream"]:
            return web.json_response(self._scored(prompt, body))
        return await self._streamed(request, body, prompt, adapter)

    def _scored(self, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
        assert body["logprob_start_len"] == 0, "only prompts are scored so"
        rows = [[None, prompt[0], None]] + [[logprob_of(t), t, None] for t in prompt[1:]]
        meta = self._meta("score") | {"input_token_logprobs": rows}
        if topk := body["top_logprobs_num"]:
            meta["input_top_logprobs"] = [None] + [_top(topk) for _ in prompt[1:]]
        return {"output_ids": [0], "meta_info": meta}

    async def _streamed(
        self, request: web.Request, body: dict[str, Any], prompt: list[int], adapter: str
    ) -> web.StreamResponse:
        rid, params = body["rid"], body["sampling_params"]
        if rid in self.running:
            raise _refused(f"Duplicate request ID detected: {rid}")
        aborted = self.running[rid] = asyncio.Event()
        ended = self._ended[rid] = asyncio.Event()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            tokens = list(prompt)
            finish: dict[str, Any] | None = None
            while finish is None:
                await self._resumed.wait()
                new = next_token(self.weights, adapter, params["sampling_seed"], tokens)
                tokens.append(new)
                made = tokens[len(prompt) :]
                if aborted.is_set():
                    finish = {"type": "abort", "message": "Aborted", "status_code": None}
                elif new in params["stop_token_ids"]:
                    finish = {"type": "stop", "matched": new}
                elif len(made) == params["max_new_tokens"]:
                    finish = {"type": "length", "length": len(made)}
                shown = made[-1:] if self.incremental else made
                meta = self._meta(rid) | {"finish_reason": finish}
                meta["output_token_logprobs"] = [[logprob_of(t), t, None] for t in shown]
                if topk := body["top_logprobs_num"]:
                    meta["output_top_logprobs"] = [_top(topk) for _ in shown]
                line = json.dumps({"text": "", "output_ids": shown, "meta_info": meta})
                await response.write(f"data: {line}\n\n".encode())
                await asyncio.sleep(self.pace_s)
            await response.write(b"data: [DONE]\n\n")
        finally:
            del self.running[rid], self._ended[rid]
            ended.set()
        return response

    def _meta(self, rid: str) -> dict[str, Any]:
        return {"id": rid, "weight_version": self.weight_version, "finish_reason": None}

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _body(request, {"rid", "abort_all"})
        for rid, aborted in self.running.items():
            if body.get("abort_all") or rid.startswith(body["rid"]):
                aborted.set()
        return web.Response()

    # ---- adapters and weights ----
    async def _load_adapter(self, request: web.Request) -> web.Response:
        assert not self.asleep, "an adapter while asleep"
        body = await _body(request, {"lora_name", "lora_path", "pinned"})
        folder = Path(body["lora_path"])
        if body["lora_name"] in self.adapters or not (folder / "adapter_config.json").is_file():
            return web.json_response({"success": False, "error_message": "no"}, status=400)
        self.adapters[body["lora_name"]] = fingerprint(folder)
        self.calls.append("load_lora_adapter")
        return web.json_response({"success": True, "error_message": None})

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        assert not self.asleep, "an adapter while asleep"
        body = await _body(request, {"lora_name"})
        if self.adapters.pop(body["lora_name"], None) is None:
            return web.json_response({"success": False, "error_message": "no"}, status=400)
        self.calls.append("unload_lora_adapter")
        return web.json_response({"success": True, "error_message": None})

    async def _pause(self, request: web.Request) -> web.Response:
        body = await _body(request, {"mode"})
        if body.get("mode", "abort") == "abort":
            for aborted in self.running.values():
                aborted.set()
            await asyncio.gather(*(ended.wait() for ended in list(self._ended.values())))
        self._resumed.clear()
        self.calls.append(f"pause {body['mode']}")
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await _body(request, {"torch_empty_cache"})
        self._resumed.set()
        self.calls.append("continue")
        return web.json_response({"message": "continued", "status": "ok"})

    async def _begin(self, request: web.Request) -> web.Response:
        await _body(request, set())
        self.updating = True
        self.calls.append("begin")
        return web.json_response({"success": True, "message": ""})

    async def _update(self, request: web.Request) -> web.Response:
        assert not self.asleep, "weights while asleep"
        body = await _body(request, {"model_path", "weight_version", "flush_cache"})
        if self._resumed.is_set() or not self.updating:
            return web.json_response({"success": False, "message": "not paused"}, status=400)
        assert not self.running, "weights changed under a request"
        self.weights = fingerprint(Path(body["model_path"]))
        self.model, self.weight_version = Path(body["model_path"]), body["weight_version"]
        self.calls.append("update")
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def _end(self, request: web.Request) -> web.Response:
        await _body(request, set())
        self.updating = False
        self.calls.append("end")
        return web.json_response({"success": True, "message": ""})

    # ---- sleep ----
    async def _release(self, request: web.Request) -> web.Response:
        await _body(request, {"tags"})
        if self.refuses_to_sleep:
            raise web.HTTPInternalServerError(text="out of host memory")
        assert not self.running, "memory released under a request"
        assert not self.asleep, "released twice"
        self.asleep = True
        self.calls.append("release")
        return web.json_response(None)

    async def _resume(self, request: web.Request) -> web.Response:
        await _body(request, {"tags"})
        assert self.asleep, "resumed without memory to resume"
        self.asleep = False
        self.calls.append("resume")
        return web.json_response(None)


def _top(topk: int) -> list[list[Any]]:
    return [[logprob_of(token), token, None] for token in range(topk)]


async def _body(request: web.Request, known: set[str]) -> dict[str, Any]:
    body: dict[str, Any] = await request.json()
    if unknown := set(body) - known:
        raise _refused(f"extra fields: {sorted(unknown)}")
    return body


def _refused(message: str) -> web.HTTPException:
    return web.HTTPBadRequest(text=json.dumps({"error": {"message": message}}))
