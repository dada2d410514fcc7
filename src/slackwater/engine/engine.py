"""The engine: add requests, step, take tokens. One step is plan, run, settle."""

import time
from collections.abc import Sequence as ListLike

import numpy as np
from numpy.typing import NDArray

from slackwater.engine.block_pool import BlockPool, root
from slackwater.engine.config import EngineConfig
from slackwater.engine.executor import Executor
from slackwater.engine.pages import PagePool
from slackwater.engine.request import (
    Decode,
    FinishedGeneration,
    GenerationRequest,
    Guide,
    Guides,
    PromptScoreRows,
    RequestFailure,
    StepOutput,
    StopReason,
    check_named_tokens,
    completes_stop_string,
)
from slackwater.engine.runner import Runner, SampledTokens
from slackwater.engine.scheduler import EngineLoad, Scheduler, StepPlan
from slackwater.engine.sequence import PromptScoring, Sequence
from slackwater.engine.slots import SlotTable
from slackwater.engine.versions import VersionStore
from slackwater.model.errors import ConfigError
from slackwater.nets.causal_lm import CausalLM


def default_executor(net: CausalLM, config: EngineConfig, pool: PagePool | None = None) -> Executor:
    """The executor for the model's device; its cache may use a shared page pool."""
    if net.device.type == "cuda":
        from slackwater.engine.cuda.executor import CudaExecutor  # late: needs Triton

        return CudaExecutor(net, config, pool)
    from slackwater.engine.cpu.executor import CpuExecutor  # late: needs numba

    return CpuExecutor(net.rank_config, config, pool)


class Engine:
    """Synchronous. `decode` turns token ids into text for stop strings; `guides` do grammars."""

    def __init__(
        self,
        net: CausalLM,
        config: EngineConfig,
        decode: Decode | None = None,
        eos_token_ids: ListLike[int] = (),
        executor: Executor | None = None,
        guides: Guides | None = None,
    ) -> None:
        self.config = config
        self._vocab_size = net.config.vocab_size
        longest = net.config.max_positions
        self.max_context = min(config.max_context or longest, longest)
        self._executor = executor or default_executor(net, config)
        # On a CPU other processes compete for the cores, so steps are timed in thread time.
        self.on_gpu = net.device.type == "cuda"
        self._clock = time.monotonic if self.on_gpu else time.thread_time
        self.versions = VersionStore(net, config, self._executor)
        self.arena, self.block_bytes = self._executor.arena, self._executor.block_bytes
        block_tokens = self._executor.block_tokens
        self._slots = SlotTable(config.max_running, self.max_context, block_tokens)
        self._blocks = BlockPool(self.arena, self.block_bytes, keep_prefixes=config.prefix_cache)
        self.capacity_tokens = (self._blocks.num_blocks - 1) * block_tokens
        self._scheduler = Scheduler(self._slots, self._blocks, config.max_step_tokens)
        self._runner = Runner(
            self._slots,
            self._scheduler,
            self._executor,
            steps_ahead=config.steps_ahead and self._executor.begins_ahead,
        )
        self._decode, self._eos = decode, frozenset(eos_token_ids)
        self._guides = guides
        self._sequences: dict[int, Sequence] = {}
        self._finished_on_arrival: list[FinishedGeneration] = []
        self._arrivals = 0
        self._steps = self._tokens_sampled = self.tokens_computed = self._tokens_cached = 0
        self._runner.warm_up(net)

    @property
    def busy(self) -> bool:
        """Whether a step would compute or report something."""
        return bool(self._sequences) or bool(self._finished_on_arrival)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises, without side effects, if it can never run."""
        version = self.versions.get(request.version)
        self._check(request)
        params = request.params
        eos = frozenset() if params.ignore_eos else self._eos
        stop_ids = eos.union(params.stop_token_ids)
        sequence = Sequence(
            request=request,
            order=self._arrivals,
            version=version,
            stop_ids=stop_ids,
            block_names=[root(request.version, version.generation)],
            scoring=PromptScoring.for_request(request) if request.scores_prompt else None,
            guide=self._guide(request, stop_ids),
        )
        self._arrivals += 1
        finished = sequence.finish_without_running(self.max_context)
        if finished is not None:
            self._finished_on_arrival.append(finished)
            return
        version.users += 1
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)

    def count_uncached_tokens(self, request_id: int) -> int:
        """How many tokens of a request that was just added are not in the prefix cache."""
        sequence = self._sequences.get(request_id)
        return 0 if sequence is None else self._scheduler.count_uncached_tokens(sequence)

    def abort(self, request_id: int) -> bool:
        """Remove a request; whether it existed."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._remove(sequence)
        return True

    def step(self, prompt_tokens: int | None = None, *, decode: bool = True) -> StepOutput:
        """Run one step over all runnable requests; `prompt_tokens` bounds its prompt tokens, and
        without `decode` it runs prompts alone if any can run.
        """
        early, self._finished_on_arrival = self._finished_on_arrival, []
        plan = self._scheduler.plan(prompt_tokens, time.monotonic(), decode=decode)
        if plan is None:
            return StepOutput(finished=tuple(early))
        began_s = self._clock()
        sampled = self._runner.run(plan)
        self._scheduler.record_step_time(plan, self._clock() - began_s)
        self._scheduler.mark_computed(plan)
        self._steps += 1
        self.tokens_computed += int(plan.counts.sum())
        self._tokens_sampled += len(sampled.slots)
        request_ids = self._slots.request_id[sampled.slots]
        scores = self._collect_prompt_scores(plan)
        ended, failed = self._settle(sampled)
        finished = [*early, *ended, *self._end_requests_without_output(plan)]
        return StepOutput(
            request_ids,
            sampled.tokens.astype(np.uint32),
            sampled.logprobs,
            tuple(finished),
            tuple(failed),
            scores,
            {int(self._slots.request_id[slot]): top for slot, top in sampled.top.items()},
        )

    def reclaim_pages(self, pages: int) -> int:
        """Return idle cache pages to the shared pool, evicting unused prefixes if necessary."""
        if self.arena.idle_pages < pages:
            self._blocks.evict_unused()
        return self.arena.reclaim(pages)

    # ---- sharing a device with another engine ----
    def warm_decode(self, rows: ListLike[int], contexts: ListLike[int]) -> None:
        """Prepare decode steps of these sizes and contexts: none compiles or captures later."""
        net = self.versions.get(self.config.base_version).net
        self._runner.warm_decode(net, rows, contexts)

    @property
    def in_use_bytes(self) -> int:
        """Cache memory of running requests, without unused prefixes."""
        return self._blocks.blocks_in_use * self.block_bytes

    @property
    def num_unused_prefixes(self) -> int:
        """Blocks kept for later requests."""
        return self._blocks.unused_named

    def load(self) -> EngineLoad:
        return self._scheduler.load()

    def youngest(self) -> int | None:
        sequence = self._scheduler.youngest()
        return None if sequence is None else sequence.request.request_id

    def evict_prefixes(self, now_s: float, before_s: float) -> int:
        """Evict prefixes unused since `before_s`; blocks released from now on are dated `now_s`."""
        self._blocks.now_s = now_s
        return self._blocks.evict_unused(before_s)

    def evict_and_release(self, now_s: float, before_s: float) -> None:
        """Evict prefixes unused since `before_s`, and return their memory to the system."""
        self.evict_prefixes(now_s, before_s)
        self.arena.release_idle()

    def close(self) -> None:
        """Free every page; the engine is not used again."""
        self._sequences.clear()
        self._executor.close()

    def gauges(self) -> dict[str, float]:
        return {
            "running": float(self._scheduler.running),
            "waiting": float(self._scheduler.waiting),
            "kv_blocks_in_use": float(self._blocks.blocks_in_use),
            "kv_blocks_named": float(self._blocks.named_blocks),
            "kv_blocks_total": float(self._blocks.num_blocks - 1),
            "kv_pages_mapped": float(self.arena.mapped_pages),
            "preemptions": float(self._scheduler.preemptions),
            "versions": float(len(self.versions)),
            "steps": float(self._steps),
            "tokens_sampled": float(self._tokens_sampled),
            "tokens_computed": float(self.tokens_computed),
            "prompt_tokens_cached": float(self._tokens_cached),
        }

    def check_integrity(self) -> None:
        """Every request is waiting or running, never both; every block is accounted for."""
        scheduled = self._scheduler.sequences()
        assert {id(s) for s in scheduled} == {id(s) for s in self._sequences.values()}
        assert len(scheduled) == len(self._sequences)
        self._scheduler.check_integrity()

    def _check(self, request: GenerationRequest) -> None:
        if request.request_id in self._sequences:
            raise ConfigError.of("request_id", request.request_id, "is running already")
        known, context = (*request.prompt, *request.generated), self.max_context
        if len(request.prompt) >= context or len(known) > context:
            fix = f"must be below the context of {context}"
            raise ConfigError.of("prompt tokens", len(known), fix)
        if min(known) < 0 or max(known) >= self._vocab_size:
            bad = next(token for token in known if not 0 <= token < self._vocab_size)
            raise ConfigError.of("prompt token", bad, f"must be 0 to {self._vocab_size - 1}")
        longest = min(len(request.prompt) + request.params.max_tokens, context)
        if max(longest, len(known)) > self.capacity_tokens:
            fix = f"must fit the cache of {self.capacity_tokens} tokens; raise kv_bytes"
            raise ConfigError.of("prompt + max_tokens", longest, fix)
        if request.params.stop_strings and self._decode is None:
            strings = request.params.stop_strings
            raise ConfigError.of("stop_strings", strings, "need a tokenizer; give token ids")
        check_named_tokens(request, self._vocab_size)
        for name in ("topk_logprobs", "topk_prompt_logprobs"):
            if (count := getattr(request.params, name)) > self._vocab_size:
                raise ConfigError.of(name, count, f"must be at most {self._vocab_size}")

    def _guide(self, request: GenerationRequest, ends: frozenset[int]) -> Guide | None:
        grammar = request.params.grammar
        if grammar is None:
            return None
        if self._guides is None:
            raise ConfigError.of(grammar.kind, "...", "needs a tokenizer; this model has none")
        return self._guides.guide(grammar, request.generated, ends)

    def _remove(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        sequence.version.users -= 1
        self._tokens_cached += sequence.cached_tokens
        del self._sequences[sequence.request.request_id]

    def _settle(
        self, sampled: SampledTokens
    ) -> tuple[list[FinishedGeneration], list[RequestFailure]]:
        """Append the new tokens; end the requests that are complete or cannot continue."""
        table, slots, tokens = self._slots, sampled.slots, sampled.tokens
        at = table.length[slots]
        table.tokens[slots, at] = tokens
        table.length[slots] = at + 1
        stopped = (table.stops[slots] == tokens[:, None]).any(axis=1)
        failed = []
        for row in np.nonzero(table.watched[slots])[0].tolist():
            slot = int(slots[row])
            stopped[row] = self._stops_by_text(slot, int(tokens[row])) or stopped[row]
            sequence = self._scheduler.sequence(slot)
            if sequence.guide is not None and sequence.guide.failed is not None:
                self._remove(sequence)
                failed.append(RequestFailure(sequence.request.request_id, sequence.guide.failed))
        ended = stopped | (at + 1 >= table.limit[slots])
        return [
            self._end(slot, "stop" if stop else "length")
            for slot, stop in zip(slots[ended].tolist(), stopped[ended].tolist(), strict=True)
            if not failed or self._scheduler.is_running(slot)
        ], failed

    def _stops_by_text(self, slot: int, token: int) -> bool:
        """Whether the newest token completes a stop string or the whole answer."""
        sequence = self._scheduler.sequence(slot)
        params = sequence.request.params
        if sequence.guide is not None:
            sequence.guide.advance(token)
            if sequence.guide.stopped:
                return True
        made = int(self._slots.length[slot]) - len(sequence.request.prompt)
        return bool(params.stop_strings) and made >= params.min_tokens and self._hits_string(slot)

    def _end(self, slot: int, reason: StopReason) -> FinishedGeneration:
        sequence = self._scheduler.sequence(slot)
        self._remove(sequence)
        return FinishedGeneration(sequence.request.request_id, reason, sequence.cached_tokens)

    def _hits_string(self, slot: int) -> bool:
        request = self._scheduler.sequence(slot).request
        assert self._decode is not None, "checked when it was added"
        first, stop = len(request.prompt), int(self._slots.length[slot])
        generated: NDArray[np.int32] = self._slots.tokens[slot, first:stop]
        return completes_stop_string(generated.tolist(), request.params.stop_strings, self._decode)

    def _collect_prompt_scores(self, plan: StepPlan) -> tuple[PromptScoreRows, ...]:
        """Scores of the prompts whose last row this step computed; each is reported once."""
        table = self._slots
        scores = []
        for slot in plan.slots[table.scored[plan.slots]].tolist():
            sequence = self._scheduler.sequence(slot)
            if table.computed[slot] >= len(sequence.request.prompt):
                scores.append(sequence.scores())
                sequence.scoring = None
                table.scored[slot] = False
        return tuple(scores)

    def _end_requests_without_output(self, plan: StepPlan) -> list[FinishedGeneration]:
        """Requests without new tokens end when all their known tokens are computed."""
        table = self._slots
        ready = table.computed[plan.slots] >= table.limit[plan.slots]
        ready &= table.length[plan.slots] >= table.limit[plan.slots]
        finished = []
        for slot in plan.slots[ready].tolist():
            if self._scheduler.is_running(slot):
                sequence = self._scheduler.sequence(slot)
                stopped = sequence.stop_ids.intersection(sequence.request.generated[-1:])
                finished.append(self._end(slot, "stop" if stopped else "length"))
        return finished
