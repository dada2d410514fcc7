"""The engine process: commands in, one step, tokens out."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slackwater.engine.config import EngineConfig
from slackwater.engine.engine import Engine, default_executor
from slackwater.engine.executor import Executor
from slackwater.engine.ranked_executor import RankedExecutor, RankFollower
from slackwater.engine.request import (
    FinishedGeneration,
    GenerationRequest,
    PromptScoreRows,
    StepOutput,
    TopTokens,
)
from slackwater.grammar.guides import GrammarGuides
from slackwater.model.errors import ConfigError, SlackwaterError
from slackwater.model.instance import InstanceKind
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net
from slackwater.nets.ranks import RankPlan, Ranks, fail_together
from slackwater.wire import messages
from slackwater.wire.tokens import TurnFinished, encode_tokens
from slackwater.worker.connection import Connection
from slackwater.worker.files import WeightStore, node_files
from slackwater.worker.process import dial, engine_parser, pin, run_worker, secret
from slackwater.worker.puller import RankLane, VersionPuller, WeightLane, weight_lane
from slackwater.worker.turn_history import TurnHistory

logger = logging.getLogger(__name__)

_MAX_VERSIONS = 4
_MAX_ADAPTERS = 64
_EXTRA_VERSIONS = 4  # pulled before older ones are dropped
_PREFIX_KEPT_S = 120.0  # unused; turns of one trajectory follow each other within seconds
_RELEASE_EVERY_S = 10.0
_BEAT_S = 2.0


class EngineWorker:
    """One engine with one base model and its versions; `least_step_s` is for benchmarks.

    `beat` tells the engine's other ranks, if any, that it is idle and alive. `add` and `abort`
    replace the engine's own methods where it shares its device.
    """

    def __init__(
        self,
        connection: Connection,
        engine: Engine,
        lane: WeightLane,
        least_step_s: float = 0.0,
        beat: Callable[[], None] | None = None,
        *,
        add: Callable[[GenerationRequest], None] | None = None,
        abort: Callable[[int], object] | None = None,
    ) -> None:
        self._add, self._abort = add or engine.add, abort or engine.abort
        self._beat = beat
        self._idle_s = _RELEASE_EVERY_S if beat is None else _BEAT_S
        self._connection = connection
        self._engine = engine
        self.puller = VersionPuller(engine, lane)
        self._requests: dict[int, GenerationRequest] = {}
        self._history = TurnHistory()
        self._inherited: set[str] = set()  # versions that the new control plane does not know of
        connection.on_adopted = self._handle_adoption
        self._least_step_s = least_step_s
        # A GPU's cache stays reserved, so releasing prefixes would free nothing.
        self._releases = not engine.on_gpu
        self._released_s = time.monotonic()

    def run(self) -> None:
        while True:
            waiting_s = 0 if self._engine.busy else self._idle_s
            for message in self._connection.receive(waiting_s, self.puller):
                if isinstance(message, messages.Stop):
                    return
                self.handle_message(message)
            self.report_versions()
            self._release_memory()
            if not self._engine.busy:
                self.send_waiting_tokens()
                if self._beat is not None:
                    self._beat()
            if self._engine.busy:
                began_s = time.perf_counter()
                output = self._engine.step()
                if self._least_step_s:
                    time.sleep(max(began_s + self._least_step_s - time.perf_counter(), 0.0))
                self.send_results(output)

    def _release_memory(self) -> None:
        now_s = time.monotonic()
        if self._releases and now_s - self._released_s >= _RELEASE_EVERY_S:
            self._released_s = now_s
            self._engine.evict_and_release(now_s, now_s - _PREFIX_KEPT_S)

    def report_versions(self) -> None:
        for outcome in self.puller.advance():
            if outcome.version not in self._inherited:
                self._connection.send(messages.encode(outcome))

    def _handle_adoption(self) -> None:
        """After adoption by a new control plane: stop and report all turns.

        It requests those again that it wants.
        """
        for request in self._requests:
            self._abort(request)
        self._requests.clear()
        self._connection.send(messages.encode(self._history.report()))
        self._inherited = {*self._engine.versions.names(), *self.puller.pulling()}

    def _drop_inherited(self) -> None:
        """Drop versions that were not requested again: a new version needs their memory."""
        still_pulling = {version for version in self._inherited if version in self.puller.pulling()}
        for version in self._inherited - still_pulling:
            self._drop(version)
        self._inherited = still_pulling

    def handle_message(self, message: messages.ToWorker) -> None:
        match message:
            case messages.Generate():
                self._generate(message)
            case messages.Abort(request):
                self._abort(request)
                self._requests.pop(request, None)
                self._history.drop(request)
            case messages.PullVersion(version, route, keep):
                self._inherited.discard(version)
                if version not in self._engine.versions.names():
                    self._drop_inherited()
                if (ready := self.puller.request(version, route, keep=keep)) is not None:
                    self._connection.send(messages.encode(ready))
            case messages.DropVersion(version):
                self._drop(version)
            case _:
                logger.warning("not for an engine: %s", type(message).__name__)

    def _generate(self, message: messages.Generate) -> None:
        try:
            request = _request(message)
            self._add(request)
        except SlackwaterError as error:
            user_error = isinstance(error, ConfigError)
            refusal = messages.GenerateRefused(message.request, str(error), user_error)
            self._connection.send(messages.encode(refusal))
            return
        self._requests[request.request_id] = request
        self._history.begin(message)

    def _drop(self, version: str) -> None:
        """Free a version; the base stays, since adapters need it."""
        if version == self._engine.config.base_version or self.puller.drop_later(version):
            return
        try:
            self._engine.versions.drop(version)
        except SlackwaterError as error:
            logger.warning("version not dropped: %s", error)

    def send_results(self, output: StepOutput) -> None:
        """Send a step's results in one write: prompt scores, alternatives, tokens and endings.

        Tokens alone may wait for those of the next steps.
        """
        # A frame with alternatives contains the tokens of one step only.
        frames = self._encode_unsent() if output.top else []
        frames += [messages.encode(_prompt_scores(scores)) for scores in output.prompt_scores]
        ids = output.request_ids.tolist()
        self._history.append(ids, output.tokens.tolist(), output.logprobs.tolist())
        waited = frames or output.top or output.finished or output.failed
        if waited or self._history.is_due(time.monotonic()):
            frames += self._encode_unsent(output)
        for failed in output.failed:
            self._requests.pop(failed.request_id)
            self._history.drop(failed.request_id)
            refusal = messages.GenerateRefused(failed.request_id, failed.error, True)
            frames.append(messages.encode(refusal))
        if frames:
            self._connection.send(*frames)

    def send_waiting_tokens(self) -> None:
        if frames := self._encode_unsent():
            self._connection.send(*frames)

    def _encode_unsent(self, output: StepOutput | None = None) -> list[bytes]:
        columns = self._history.take_unsent(time.monotonic())
        finished = [self._finish_turn(finished) for finished in output.finished] if output else ()
        if not (columns.requests or finished):
            return []
        frame = encode_tokens(replace(columns, finished=finished))
        if output is None or not output.top:
            return [frame]
        rows = [_top_row(output, request) for request in columns.requests]
        return [messages.encode(messages.SampledTopK(rows)), frame]

    def _finish_turn(self, finished: FinishedGeneration) -> TurnFinished:
        request = self._requests.pop(finished.request_id)
        total = self._history.end(finished.request_id)
        return TurnFinished(finished.request_id, finished.reason, total, request.version)


def _request(message: messages.Generate) -> GenerationRequest:
    return GenerationRequest(
        request_id=message.request,
        prompt=tuple(np.frombuffer(message.prompt, "<u4").tolist()),
        params=message.sampling,
        version=message.version,
        generated=tuple(np.frombuffer(message.generated, "<u4").tolist()),
        scores_prompt=message.score_prompt,
        owner=message.owner,
    )


def _prompt_scores(scores: PromptScoreRows) -> messages.PromptScores:
    logprobs: list[float | None] = [None, *scores.logprobs[1:].tolist()]
    topk = [] if scores.top is None else [None, *_pair_rows(scores.top)[1:]]
    targets = [row.tolist() for row in scores.targets]
    alternatives = [] if scores.alternatives is None else _pair_rows(scores.alternatives)
    return messages.PromptScores(scores.request_id, logprobs, topk, targets, alternatives)


def _top_row(output: StepOutput, request: int) -> list[tuple[int, float]]:
    top = output.top.get(request)
    return [] if top is None else _pair_rows(top)[0]


def _pair_rows(top: TopTokens) -> list[list[tuple[int, float]]]:
    """Tokens with their log-probs, by position."""
    rows = zip(top.tokens.tolist(), top.logprobs.tolist(), strict=True)
    return [list(zip(tokens, values, strict=True)) for tokens, values in rows]


def _text_decoder(file: Path) -> Callable[[Sequence[int]], str]:
    """Token ids to text, for stop strings."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    return decode


def heartbeat_gauges(engine: Engine) -> dict[str, float]:
    gauges = engine.gauges()
    block_tokens = engine.capacity_tokens / max(gauges["kv_blocks_total"], 1.0)
    return gauges | {
        "produced_tokens": gauges["tokens_sampled"],
        "prefilled_tokens": max(gauges["tokens_computed"] - gauges["tokens_sampled"], 0.0),
        "kv_used_tokens": gauges["kv_blocks_in_use"] * block_tokens,
    }


def text_engine(
    model: Path, net: CausalLM, config: EngineConfig, executor: Executor | None = None
) -> Engine:
    """An engine that can decode a model's tokens, if it has a tokenizer, for stop strings and
    grammars.
    """
    file = model / "tokenizer.json"
    if not file.is_file():
        return Engine(net, config, executor=executor)
    guides = GrammarGuides(file, net.config.vocab_size, net.config.eos_token_ids)
    return Engine(net, config, _text_decoder(file), executor=executor, guides=guides)


def new_engine(
    model: Path, *, device: str, kv_mb: int, max_running: int, base_version: str
) -> Engine:
    return text_engine(model, *_net_and_config(model, device, kv_mb, max_running, base_version))


def new_ranked_engine(
    model: Path, ranks: Ranks, *, device: str, kv_mb: int, max_running: int, base_version: str
) -> tuple[Engine, RankedExecutor]:
    """Rank 0's engine, and the executor that drives the other ranks."""
    net, config = _net_and_config(model, device, kv_mb, max_running, base_version, ranks)
    executor = RankedExecutor(default_executor(net, config), ranks)
    return text_engine(model, net, config, executor), executor


def _net_and_config(
    model: Path,
    device: str,
    kv_mb: int,
    max_running: int,
    base_version: str,
    ranks: Ranks | None = None,
) -> tuple[CausalLM, EngineConfig]:
    """The net and the engine's configuration; on a GPU bfloat16, long prompt steps, large pages."""
    on_gpu = device.startswith("cuda")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if ranks is None:
        net = load_net(model, dtype=dtype, device=device)
    else:
        from slackwater.training.sharding import load_sharded_net  # late: 1 s for DTensor

        if ranks.layout.dp > 1:
            raise ConfigError.of("layout dp", ranks.layout.dp, "must be 1; start more engines")
        net, _ = load_sharded_net(model, ranks, frozen=True, dtype=dtype, device=device, seed=0)
    config = EngineConfig(
        kv_bytes=kv_mb << 20,
        page_bytes=(32 if on_gpu else 2) << 20,
        max_running=max_running,
        max_step_tokens=8192 if on_gpu else 512,
        max_full_versions=_MAX_VERSIONS + _EXTRA_VERSIONS,
        max_adapters=_MAX_ADAPTERS + _EXTRA_VERSIONS,
        base_version=base_version,
    )
    return net, config


def follow_engine(
    model: Path, weights: WeightStore, ranks: Ranks, *, device: str, kv_mb: int, max_running: int
) -> None:
    """On ranks other than 0: execute rank 0's steps until its engine closes."""
    net, config = _net_and_config(model, device, kv_mb, max_running, "", ranks)
    lane = RankLane(weights, net.config, ranks)
    RankFollower(net, default_executor(net, config), ranks, lane.fetch).run()


def main() -> None:
    parser = engine_parser("An engine worker; `slackwater up` starts it.")
    parser.add_argument(
        "--kind", default="dedicated", choices=[kind.value for kind in InstanceKind]
    )
    parser.add_argument("--least-step-ms", type=float, default=0.0, help="for measurements")
    parser.add_argument("--kv-mb", type=int, default=512, help="memory of the KV cache")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plan = RankPlan.from_environment(os.environ)
    ranks = None if plan is None else Ranks.join(plan, options.device)
    files = node_files(options.files, secret(), pin())
    model, executor = files.model(options.model), None
    lane: WeightLane
    sizes: dict[str, Any] = {"device": options.device, "kv_mb": options.kv_mb}
    sizes["max_running"] = options.max_running
    if ranks is None:  # the lane first: it forks while this process has one thread
        lane = weight_lane(files.weights(), options, options.device, own_process=True)
        engine = new_engine(model, base_version=options.base_version, **sizes)
    elif ranks.leads:
        engine, executor = new_ranked_engine(
            model, ranks, base_version=options.base_version, **sizes
        )
        lane = RankLane(files.weights(), NetConfig.from_directory(model), ranks)
    else:
        with fail_together():
            follow_engine(model, files.weights(), ranks, **sizes)
        return
    facts = messages.EngineFacts(
        base_model=options.base,
        max_running=options.max_running,
        max_context_tokens=engine.max_context,
        kv_tokens=engine.capacity_tokens,
        max_versions=_MAX_VERSIONS,
        max_adapters=_MAX_ADAPTERS,
        kind=options.kind,
        node=options.node,
    )
    hello = messages.Hello(options.worker, "engine", facts)
    with dial(options.connect, hello) as connection:
        connection.report_gauges(lambda: heartbeat_gauges(engine))
        least_step_s = options.least_step_ms / 1e3
        if executor is None:
            EngineWorker(connection, engine, lane, least_step_s).run()
            return
        with fail_together():
            EngineWorker(connection, engine, lane, least_step_s, executor.send_heartbeat).run()
            executor.close()


if __name__ == "__main__":
    run_worker(main)
