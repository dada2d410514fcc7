"""A running service as the dashboard's source; viewers see only what they may."""

import asyncio
import codecs
import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from slackwater.model.errors import ConfigError, NotFoundError, RefusedError
from slackwater.model.folder import read_object
from slackwater.model.ids import JobId, ModelId, TenantId
from slackwater.model.instance import InstanceKind, InstanceState
from slackwater.runtime.executors.recent_trajectories import EndedTurn, join_turns
from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.services.activity import ActivitySampler
from slackwater.runtime.store.checkpoints import parse_path
from slackwater.runtime.store.job_accounts import job_row
from slackwater.serve.dashboard.browser_sessions import Viewer
from slackwater.serve.dashboard.source import PlannedFleet, PlannedJob, read_curves
from slackwater.serve.openai.text import TextCodec, TextCodecs
from slackwater.serve.operator.coschedule import visible_state
from slackwater.serve.operator.metrics import gauges_of, serving_of, tenant_gauges
from slackwater.serve.operator.status import problems_of, starting_workers
from slackwater.serve.tinker.checkpoints import read_checkpoints

_MAX_ENDED_JOBS = 100
_MAX_ACTIONS = 20
_MAX_LINKS = 40
_MAX_NODES = 200
_MAX_HOLDERS = 3
_MAX_TRAJECTORIES = 12
_MAX_TOKENS = 8192
_MAX_CHECKPOINTS = 50
_LOG_BYTES = 1 << 16


class LiveSource:
    """Reads the control plane on each request; stores only the sampled timeline."""

    mode: Literal["live", "recording"] = "live"

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._codecs = TextCodecs()
        self.sampler = ActivitySampler(plane)
        self.timeline = self.sampler.timeline

    def viewer(self, key: str) -> Viewer | None:
        """The viewer of a key; None for a job's key, whose driver must not see everything."""
        tenant = self._plane.tenants.find_by_key(key)
        if tenant is None or self._plane.tenants.job_of_key(key) is not None:
            return None
        return Viewer(tenant, self._plane.is_operator(tenant))

    def now_s(self) -> float:
        return self.sampler.now_s()

    def is_closing(self) -> bool:
        return self._plane.board.is_closed

    # ---- the fleet ----
    def snapshot(self, viewer: Viewer) -> dict[str, Any]:
        plane, operator = self._plane, viewer.is_operator
        shared = None if plane.phases is None else plane.phases.state()
        if shared is not None and not operator:
            shared = visible_state(viewer.tenant, shared)
        rows = self._jobs(viewer, shared)
        found: dict[str, Any] = {
            "now_s": round(self.now_s(), 3),
            "lanes": len(self.timeline.lanes()),
            "problems": problems_of(plane, viewer.tenant),
            "gauges": gauges_of(plane) if operator else tenant_gauges(plane),
            "jobs": rows,
            "pools": {} if shared is None else shared["pools"],
            "permits": None if shared is None or not operator else shared["permits"],
            "nodes": [] if shared is None else shared["nodes"][:_MAX_NODES],
            "weights": self._weights(viewer),
        }
        if operator:
            found |= {
                "starting": starting_workers(plane),
                "serving": serving_of(plane),
                "capacity": _capacity(plane.instances.rows()),
                "cost": self.sampler.slack.capacity(),
                "slack": self.sampler.slack.rows(),
                "actions": plane.actions.top(_MAX_ACTIONS),
                "links": _links(plane),
            }
        return found

    def _jobs(self, viewer: Viewer, shared: dict[str, Any] | None) -> list[dict[str, Any]]:
        entries = [
            entry
            for entry in self._plane.controller.jobs.entries()
            if viewer.is_operator or entry.tenant == viewer.tenant
        ]
        live = [entry for entry in entries if not entry.stage.over]
        over = [entry for entry in entries if entry.stage.over][-_MAX_ENDED_JOBS:]
        now_s = loop_time()
        rows = self._plane.submissions.add_progress(
            [job_row(entry, now_s) for entry in live + over]
        )
        more = {} if shared is None else {row["job"]: row for row in shared["jobs"]}
        rows = [more.get(row["job"], {}) | row for row in rows]
        for row in rows:
            row["why"] = waiting_reason(row, rows)
        return rows

    def _weights(self, viewer: Viewer) -> list[dict[str, Any]]:
        return [
            {
                "version": record.version,
                "number": record.number,
                "job": record.job,
                "model": record.base_model,
                "offered": offered,
                "pulling": pulling,
                "turns": record.turns,
            }
            for record, offered, pulling in self._plane.controller.weights.newest()
            if self.sees(viewer, record.job)
        ]

    def sees(self, viewer: Viewer, job: str | None) -> bool:
        """Whether the viewer may see data of this job; data without a job is the operator's."""
        if viewer.is_operator or job is None:
            return viewer.is_operator
        entry = self._plane.controller.jobs.find(JobId(job))
        return entry is not None and entry.tenant == viewer.tenant

    # ---- one job ----
    def _owner(self, viewer: Viewer, job: str) -> TenantId:
        """The job's tenant; for other tenants the job does not exist."""
        entry = self._plane.controller.jobs.find(JobId(job))
        if entry is None or not self.sees(viewer, entry.job):
            raise NotFoundError(f"job: {job[:200]!r} is not a job of yours")
        return entry.tenant

    async def job(self, viewer: Viewer, job: str) -> dict[str, Any]:
        owner = self._owner(viewer, job)
        facts = self._plane.submissions.describe(owner, job)
        folder = Path(facts["run"]) if "run" in facts else None
        facts |= {
            "trajectories": self._slowest(JobId(job)),
            "breakdown": self.sampler.breakdown(JobId(job)),
            "curves": {},
        }
        if folder is not None:
            facts["curves"] = await asyncio.to_thread(read_curves, folder / "metrics.jsonl")
        facts["checkpoints"] = await self._checkpoints(owner, JobId(job), folder)
        return facts

    def _slowest(self, job: JobId) -> list[dict[str, Any]]:
        """Live trajectories, slowest first, then recently ended ones."""
        now_s = loop_time()
        live: list[dict[str, Any]] = [
            {
                "trajectory": str(turn.spec.trajectory),
                "took_s": round(turn.age_s(now_s), 2),
                "waited_s": round(turn.total_queued_s(now_s), 2),
                "state": turn.instance or "waits",
                "moves": turn.moves,
                "prompt_tokens": len(turn.spec.prompt),
                "tokens": len(turn.tokens),
                "limit": turn.limit,
            }
            for turn in self._plane.controller.rollout.turns_of(job)
        ]
        live.sort(key=lambda row: -row["took_s"])
        ended = [
            {
                "trajectory": str(each.trajectory),
                "took_s": round(each.ended_s - each.began_s, 2),
                "waited_s": None,
                "state": "ended",
                "moves": each.moves,
                "prompt_tokens": len(each.turns[0].prompt),
                "tokens": each.sampled_tokens,
                "limit": None,
                "turns": len(each.turns),
            }
            for each in self._plane.rollout.recent.trajectories_of(job, now_s)
        ]
        under_way = {row["trajectory"] for row in live}
        ended = [row for row in ended if row["trajectory"] not in under_way]
        return live[:_MAX_TRAJECTORIES] + ended[:_MAX_TRAJECTORIES]

    async def conversation(self, viewer: Viewer, job: str, trajectory: str) -> dict[str, Any]:
        """The last tokens of a trajectory with their texts, and log-probs of sampled ones."""
        self._owner(viewer, job)
        ended = self._plane.rollout.recent.find(JobId(job), trajectory)
        turns_of = self._plane.controller.rollout.turns_of
        live = next((t for t in turns_of(JobId(job)) if t.spec.trajectory == trajectory), None)
        if ended is None and live is None:
            raise NotFoundError(f"trajectory: {trajectory[:200]!r} is neither live nor recent")
        turns = [] if ended is None else list(ended.turns)
        model = live.spec.base_model if live is not None else ended.base_model if ended else ""
        if live is not None:
            turns.append(EndedTurn(live.spec.prompt, live.tokens[:], live.logprobs[:]))
        tokens, logprobs = join_turns(turns)
        texts = await self._texts(model, tokens[-_MAX_TOKENS:].tolist())
        return {
            "trajectory": trajectory,
            "model": model,
            "version": live.version if live is not None else ended.version if ended else "",
            "turns": len(turns),
            "left_out": max(len(tokens) - _MAX_TOKENS, 0),
            "ids": tokens[-_MAX_TOKENS:].tolist(),
            "logprobs": [
                None if math.isnan(value) else round(value, 4) for value in logprobs[-_MAX_TOKENS:]
            ],
            "texts": texts,
        }

    async def _texts(self, model: str, tokens: list[int]) -> list[str] | None:
        """Each token's text; None if the model has no tokenizer."""
        try:
            codec = await self._codecs.load(self._plane.bases.get(model))
        except (RefusedError, NotFoundError):
            return None
        return await asyncio.to_thread(lambda: list(_decode_tokens(codec, tokens)))

    async def _checkpoints(
        self, owner: TenantId, job: JobId, folder: Path | None
    ) -> list[dict[str, Any]]:
        """Checkpoints of the job's open models, and of the model in its driver's folder."""
        plane = self._plane
        models: set[ModelId] = {
            model.model
            for model in plane.training.models()
            if plane.sessions.job_of(model.session) == job
        }
        if folder is not None:
            saved = await asyncio.to_thread(read_object, folder / "checkpoint.json") or {}
            with contextlib.suppress(ConfigError):  # none yet
                models.add(parse_path(str(saved.get("state_path")))[0])
        found = await read_checkpoints(plane, owner)
        mine = [checkpoint for checkpoint in found if checkpoint.model in models]
        return [
            {
                "path": checkpoint.path,
                "kind": checkpoint.kind,
                "bytes": checkpoint.size_bytes,
                "created_s": checkpoint.created_s,
            }
            for checkpoint in mine[:_MAX_CHECKPOINTS]
        ]

    def logs(self, viewer: Viewer, job: str, place: int) -> dict[str, Any]:
        return self._plane.submissions.log(self._owner(viewer, job), job, place, _LOG_BYTES)

    def stop(self, viewer: Viewer, job: str) -> dict[str, Any]:
        return self._plane.submissions.stop(self._owner(viewer, job), job)

    def resume(self, viewer: Viewer, job: str) -> dict[str, Any]:
        return self._plane.submissions.resume(self._owner(viewer, job), job)

    # ---- what-if ----
    def planner_fleet(self, viewer: Viewer) -> PlannedFleet:
        if not viewer.is_operator:
            raise RefusedError(f"key: of {viewer.tenant}; only the operator may plan")
        plane = self._plane
        jobs = [self._planner_job(entry.job) for entry in plane.controller.jobs.entries()]
        known = tuple(job for job in jobs if job is not None)
        if not known:
            raise RefusedError("no job has finished an iteration yet: nothing to plan with")
        spot = _count(plane, InstanceKind.SPOT)
        rollout, train = plane.settings.coscheduled_nodes
        nodes = (max(len(rollout), 1) + spot, max(len(train), 1))
        if (shared := plane.settings.coschedule) is None:
            return PlannedFleet(*nodes, spot_nodes=spot, jobs=known)
        return PlannedFleet(*nodes, spot, shared.host_memory_gb, shared.placement, known)

    def _planner_job(self, job: JobId) -> PlannedJob | None:
        """Phase times of the co-scheduler's profile, else device seconds per iteration."""
        entry = self._plane.controller.jobs.find(job)
        if entry is None or entry.stage.over:
            return None
        phases = self._plane.controller.phases
        state = None if phases is None else phases.scheduler.find(entry.job)
        profile = entry.profile if state is None else state.profile
        slo = 2.0 if entry.terms is None else entry.terms.slo
        if profile is not None:
            return PlannedJob(
                job=entry.job,
                rollout_s=profile.rollout_s,
                train_s=profile.train_s,
                sync_s=profile.sync_s,
                slo=slo,
                rollout_nodes=profile.rollout_nodes,
                train_nodes=profile.train_nodes,
                rollout_state_gb=profile.rollout_state_gb,
                train_state_gb=profile.train_state_gb,
                model_billions=profile.model_billions,
            )
        account = entry.account
        done = entry.iterations_done or account.operations // 2  # a pass and a step each
        if not done or account.engine_s <= 0 or account.trainer_s <= 0:
            return None
        lengths = (account.engine_s / done, account.trainer_s / done)
        return PlannedJob(entry.job, *lengths, sync_s=0.0, slo=slo)


def _decode_tokens(codec: TextCodec, tokens: list[int]) -> Iterator[str]:
    """The text of each token; a character split over tokens appears at the last one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        yield decoder.decode(codec.bytes.lookup(token))


def waiting_reason(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Which jobs hold the nodes that a waiting job needs, or why it is not placed."""
    if row["stage"] in ("held", "refused", "failed"):
        return str(row["reason"])
    if row.get("waits_s") is None:
        return ""
    # A job without a group is being profiled, on any free nodes.
    holders = [
        f"{other['job'].partition('/')[2] or other['job']} ({other['phase']})"
        for other in rows
        if other.get("phase") and row.get("group") in (None, other.get("group"))
    ]
    more = f" and {len(holders) - _MAX_HOLDERS} more" if len(holders) > _MAX_HOLDERS else ""
    hold = "hold" if len(holders) > 1 else "holds"
    named = ", ".join(holders[:_MAX_HOLDERS])
    whom = f" while {named}{more} {hold} the nodes" if holders else ""
    return f"waits {row['waits_s']:.1f} s for its turn{whom}"


def _links(plane: ControlPlane) -> list[dict[str, Any]]:
    """Weight transfers between relays of two nodes."""
    routes = plane.controller.weights.routes
    return [
        {
            "version": payload.version,
            "delta": bool(payload.base),
            "source": source,
            "node": node,
            "bytes": size,
            "slow": routes.crosses(source, node),
        }
        for payload, source, node, size in routes.under_way()[:_MAX_LINKS]
    ]


def _capacity(instances: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Instances by kind and state."""
    found: dict[str, dict[str, int]] = {}
    for row in instances:
        states = found.setdefault(str(row.get("kind", "not joined")), {})
        states[str(row["state"])] = states.get(str(row["state"]), 0) + 1
    return found


def _count(plane: ControlPlane, kind: InstanceKind) -> int:
    return sum(
        record.spec.kind is kind and record.state is InstanceState.READY
        for record in plane.controller.rollout.state.instances
    )
