"""The control plane of one service: its parts put together, started, watched and stopped."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import sqlalchemy as sa

from slackwater.control.actions.broker import ActionBroker
from slackwater.control.actions.settings import BrokerSettings
from slackwater.control.brain import Brain
from slackwater.control.coschedule.events import NodeLost
from slackwater.control.lending.lender import Lender
from slackwater.control.operations.controller import OperationsController
from slackwater.control.record import RecordedController
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.model.errors import ConfigError, NotFoundError
from slackwater.model.ids import InstanceId, JobId, NodeId, RequestId, SessionId, TenantId, WorkerId
from slackwater.model.operation import FaultOwner, Operation, OpKind
from slackwater.model.session import TrainedModel
from slackwater.runtime.bodies.actions import ActionsBody
from slackwater.runtime.bodies.drivers import DriverParts, DriversBody
from slackwater.runtime.bodies.lending import LendingBody, Offer
from slackwater.runtime.bodies.operations import OperationsBody, OperationsParts
from slackwater.runtime.bodies.phases import PhaseHands, PhasesBody
from slackwater.runtime.bodies.rehearsal import rehearse, rehearse_sharing
from slackwater.runtime.bodies.rollout import RolloutBody
from slackwater.runtime.bodies.vital_controller import VitalController
from slackwater.runtime.launch.agents import JoinAddress
from slackwater.runtime.launch.fleet import Fleet
from slackwater.runtime.launch.nodes import agent_name
from slackwater.runtime.launch.worker_plans import WorkerPlans
from slackwater.runtime.net.background import Background
from slackwater.runtime.net.certificate import Certificate
from slackwater.runtime.net.depot import Depot
from slackwater.runtime.net.hub import WorkerHub
from slackwater.runtime.services.actions import ActionService
from slackwater.runtime.services.fair_work import FairWork
from slackwater.runtime.services.finishing import Finishing, sampling_session_of
from slackwater.runtime.services.helper_processes import HelperProcesses
from slackwater.runtime.services.housekeeping import Household, Housekeeping
from slackwater.runtime.services.instances import InstanceService, Premises
from slackwater.runtime.services.jobs import Jobs
from slackwater.runtime.services.kept_promise import KeptPromise
from slackwater.runtime.services.loop_shares import LoopShares
from slackwater.runtime.services.loop_watch import LoopWatch
from slackwater.runtime.services.meters import Meters
from slackwater.runtime.services.phases import PhaseService, coscheduled_places, places_of
from slackwater.runtime.services.sampling import KIND as SAMPLE
from slackwater.runtime.services.sampling import SamplingService
from slackwater.runtime.services.sessions import Sessions
from slackwater.runtime.services.submissions import Submissions
from slackwater.runtime.services.tenants import Tenants
from slackwater.runtime.services.turn_shares import TurnShares
from slackwater.runtime.settings import SILENT_AFTER_S, ServiceSettings
from slackwater.runtime.store.base_models import BaseModel, BaseModels
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.future_board import FutureBoard, Outcome
from slackwater.runtime.store.known_versions import known_versions
from slackwater.runtime.store.op_payloads import decode_publish
from slackwater.runtime.store.schema import operations, samples
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.runtime.store.versions import VersionShelf
from slackwater.wire import messages
from slackwater.wire.agent import CargoArrived, CargoBroke
from slackwater.wire.frames import Frame, FrameKind

logger = logging.getLogger(__name__)

ROLLOUT_SETTINGS = RolloutSettings(lease_s=SILENT_AFTER_S)  # without a configuration file


class ControlPlane:
    """Everything behind the HTTP face. `failed` is set when something died that must not."""

    def __init__(
        self, settings: ServiceSettings, state: StateDirectory, shelf: VersionShelf
    ) -> None:
        self.settings = settings
        self.state = state
        self.shelf = shelf
        self.bases = BaseModels(
            {name: BaseModel.read(name, path) for name, path in settings.models.items()},
            or_none=settings.only_actions,
        )
        self.tenants = Tenants.open(state, settings.tenants)
        self.failed = asyncio.Event()
        self.store = Store(settings.database_url or state.database_url, self.failed.set)
        self.meters = Meters()
        self.board = FutureBoard(self.meters.settled)
        self.background = Background(lambda error: self.failed.set())
        secret = state.fleet_secret()
        file = settings.whole_fleet
        self._certificate = Certificate.kept_in(state.root) if file.encrypted else None
        self.hub = WorkerHub(
            self,
            secret,
            silent_after_s=SILENT_AFTER_S,
            listen=file.address(),
            context=None if self._certificate is None else self._certificate.context(),
        )
        plans = WorkerPlans(settings, self.bases)
        depot = Depot(state.root, self.bases.directories(), secret)
        self.fleet = Fleet(file, state, self.hub, depot, plans.of, secret)
        self.sessions = Sessions(self.store, settings.session_silent_after_s)
        self._recording = _Recording(settings.record)
        shared = settings.coschedule
        rollout_nodes, train_nodes = settings.coscheduled_nodes
        self.brain = Brain(
            settings.rollout_settings,
            coscheduler=None
            if shared is None
            else shared.new_coscheduler(len(rollout_nodes), len(train_nodes)),
            limits=None if shared is None else shared.limits,
        )
        self._places = coscheduled_places(rollout_nodes, train_nodes)
        operations_controller = OperationsController(settings.operations)
        self.rollout = RolloutBody(
            self.hub,
            self._vital("brain", self.brain),
            self._release,
            lambda version: self.background.spawn(asyncio.to_thread(shelf.drop, version)),
            meters=self.meters,
        )
        self.phases: PhaseService | None = None
        if shared is not None:
            self.phases = PhaseService(
                *(shared, self.brain, self.rollout.feed, places_of(self._places))
            )
            self.rollout.place_of = partial(self._coscheduled_node, "rollout")
        served = settings.serving
        self._served = served
        if served is not None:
            others = [base for base in self.bases if base.name != served.model]
            self.rollout.lending = LendingBody(
                self.hub.send,
                self._vital("lending", Lender()),
                {base.name: Offer(base.version, base.uri) for base in others},
                self.rollout.live_jobs,
            )
            self.rollout.devices.lending = self.rollout.lending
        self.instances = InstanceService(
            Premises(self.fleet.spawn, plans.engine_arguments, state.logs),
            self.brain,
            self.rollout,
            self.fleet.supervisor,
        )
        self.jobs = Jobs(
            *(self.store, self.sessions, self.brain.jobs, self.rollout.feed),
            settings.tenants[0],
        )
        self.drivers = DriversBody(
            DriverParts(
                *(self.store, state.root / "jobs", self.rollout.feed, self.background.spawn),
                *(self._key_of_job, self._end_sessions),
            )
        )
        self.rollout.carry_out_of_drivers = self.drivers.carry_out
        self.submissions = Submissions(
            *(self.store, self.brain, self.rollout.feed, self.drivers),
            lambda: [base.name for base in self.bases],
        )
        names = self.tenants.names()
        self.shares = TurnShares(settings.max_live_turns, names)
        self.fair_work = FairWork(len(names))
        self.loop_shares = LoopShares(len(names))
        self.loop_watch = LoopWatch()
        self.helpers = HelperProcesses("slackwater.serve.http.helper")
        self.sampling = SamplingService(
            *(self.store, self.board, self.background, self.rollout, self.shares),
            (self.loop_shares, self.fair_work),
            self.sessions.job_of,
        )
        self.training = OperationsBody(
            OperationsParts(
                *(self.store, self.board, self.hub, state, self.bases, self.background),
                *(self.rollout.devices, self.sessions.job_of),
                None if shared is None else self.rollout.feed,
                partial(self._coscheduled_node, "train"),
            ),
            operations_controller,
            self._vital("operations", operations_controller),
            Finishing(state, shelf),
            self._operation_finished,
            settings.max_waiting_bytes // len(names),
        )
        self.housekeeping = Housekeeping(
            Household(
                *(settings, self.store, state, shelf, self.sessions),
                *(self.sampling, self.training, self.rollout, self.jobs, self.end_session),
            )
        )
        self._roles: dict[WorkerId, str] = {}
        self._is_stopping = False
        broker = ActionBroker(BrokerSettings(max_waiting=settings.max_waiting_actions))
        self._action_body = ActionsBody(
            self.hub, self.store, self._vital("actions", broker), self.background.spawn
        )
        self.actions = ActionService(
            *(self.store, self.background, self._action_body, broker, settings.results_kept_s)
        )

    def _vital(self, name: str, controller: Any) -> Any:
        """Recorded if anybody asked, and missed if it raises."""
        return VitalController(self._recording.of(name, controller), self.failed.set)

    def _key_of_job(self, job: JobId) -> str:
        tenant, _, name = job.partition("/")
        return self.tenants.job_key(TenantId(tenant), name)

    async def _end_sessions(self, job: JobId, why: str) -> None:
        """What a driver that is gone had open."""
        for session in self.sessions.living(job):
            status = {"type": "cancelled", "detail": why}
            await self.end_session(session, status, f"session {session} ended: {why}")

    def _release(self, worker: WorkerId) -> None:
        """The manager lets an instance go: a process ends, a loan's connection does."""
        if self.rollout.lending is not None and self.rollout.lending.is_loan(worker):
            self.hub.hang_up(worker)
        else:
            self.instances.release(worker)

    async def start(self, url: str | None = None) -> None:
        """Open the store, take over what it has, and start the workers; at `url` drivers of jobs find the service."""
        if self._served is not None:
            now_s = asyncio.get_running_loop().time()
            self.rollout.promise = KeptPromise(self._served.model, self._served.slo, now_s)
        await self.store.open()
        await self.hub.start()
        self.rollout.name_owners(self.tenants.names())
        if self.phases is not None and self.settings.coschedule is not None:
            await asyncio.to_thread(rehearse_sharing, self.settings.coschedule)
            self._begin_phases(self.phases)
            await self.phases.adopt(self.store)
        await self.jobs.adopt(asyncio.get_running_loop().time(), await self.submissions.read())
        for base in self.bases:
            self.rollout.published(base.version, base.name)
        await self._adopt_versions()
        await self.training.adopt()
        await self.sampling.adopt()
        if self.settings.brokers_actions:
            await asyncio.to_thread(rehearse)
        await self.actions.adopt()
        self.background.spawn(self.housekeeping.run())
        self.state.write_models(self.bases.directories())
        await self.fleet.start(self._certificate)
        models = [base.name for base in self.bases]
        listed = self.settings.instances
        self.instances.keep({InstanceId(entry.name): entry.wish(models) for entry in listed})
        if url is not None:
            await self.submissions.go_on(url)

    def _begin_phases(self, phases: PhaseService) -> None:
        """From now on permits are given; the event loop runs."""
        hands = PhaseHands(
            self.rollout.feed,
            self.training.gate,
            self._end_refused,
            lambda: phases.save_soon(self.store, self.background),
        )
        phases.body = self.rollout.phases = PhasesBody(tuple(places_of(self._places)), hands)

    def _write_timeline(self) -> None:
        """Every run leaves one."""
        if self.phases is not None:
            with contextlib.suppress(
                OSError
            ):  # a full disk must not keep the service from stopping
                (self.state.root / "timeline.json").write_bytes(self.phases.timeline())

    def _coscheduled_node(self, pool: str, worker: WorkerId) -> NodeId | None:
        """The co-scheduler's name of the node that a worker is on, as one of a pool."""
        node = self.fleet.nodes.node_of(worker)
        return None if node is None else self._places.get((pool, node))

    def _end_refused(self, job: JobId, reason: str) -> None:
        """A job that can never run is told so, whatever it has waiting."""
        for session in self.sessions.living(job):
            status = {"reason": {"type": "errored"}}
            self.background.spawn(self.end_session(session, status, f"refused: {reason}"))

    def release_waiters(self) -> None:
        """Answer the long polls that are held, so that a stop need not cut them off."""
        self.board.close()
        self.sampling.finished.close()
        self.actions.close()
        if self.rollout.phases is not None:
            self.rollout.phases.close()

    async def stop(self) -> None:
        """Leave everything durable; what was under way goes on after the next start."""
        await self.drivers.close()
        self.training.close()
        self.rollout.close()
        if self.rollout.phases is not None:
            self.rollout.phases.close()
            self._write_timeline()
        if self.rollout.lending is not None:
            self.rollout.lending.close()
        self._is_stopping = True
        self.actions.close()
        self._action_body.close()
        self.housekeeping.stop()
        await self.hub.close()
        await self.instances.close()
        await self.fleet.close()
        await self.background.drain(5.0)
        self.fair_work.close()
        self.helpers.close()
        await self.jobs.save()
        if self.phases is not None and self.rollout.phases is not None:
            drawn = self.state.root / "timelines" / f"permits-{int(time.time())}.json"
            await asyncio.to_thread(_write_new, drawn, self.phases.timeline())
        await self.store.close()
        self._recording.close()

    def join_address(self) -> JoinAddress:
        """What an agent of another machine must know to join."""
        return self.fleet.join_address(self._certificate)

    # ---- workers ----
    def worker_joined(self, hello: messages.Hello) -> None:
        worker = WorkerId(hello.worker)
        if hello.role == "agent":
            if hello.node is None or agent_name(NodeId(hello.node.node)) != worker:
                raise ConfigError.of("hello: worker", worker, "must be agent:NODE of its node")
            self.fleet.agent_joined(hello.node)
            self.rollout.relays.joined(hello.node)
        self._roles[worker] = hello.role
        self.fleet.supervisor.joined(worker)
        logger.info("worker joined worker=%s role=%s", worker, hello.role)
        if hello.role == "trainer":
            self.training.trainer_joined(worker)
        elif hello.sandbox is not None:
            self._action_body.worker_joined(worker, hello.sandbox)
        elif hello.engine is not None:
            self.rollout.engine_joined(worker, hello.engine)

    def worker_said(self, worker: WorkerId, frames: Sequence[Frame]) -> None:
        for frame in frames:
            role = self._roles[worker]
            if role == "engine":
                self.rollout.engine_said(worker, frame)
            elif self._roles[worker] == "sandbox":
                self._action_body.worker_said(worker, frame)
            elif frame.kind is FrameKind.CONTROL:
                message = messages.decode_from_worker(frame.body)
                if isinstance(message, CargoArrived | CargoBroke):
                    self.rollout.relays.said(_node_of(worker), message)
                elif isinstance(message, messages.VersionStocked):
                    self.rollout.relays.stocked(message)
                elif role == "agent":
                    self.fleet.agent_said(_node_of(worker), message)
                else:
                    self.training.trainer_said(worker, message)

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        role = self._roles.pop(worker)
        logger.warning("worker lost worker=%s reason=%s", worker, reason)
        if role == "agent":
            self.rollout.relays.lost(_node_of(worker))
            self.fleet.agent_lost(_node_of(worker))
            if self.phases is not None:
                for pool in ("rollout", "train"):
                    if (node := self._places.get((pool, _node_of(worker)))) is not None:
                        self.rollout.feed(NodeLost(asyncio.get_running_loop().time(), node))
            return
        if not (self._is_stopping and role == "sandbox"):  # which cleans up after itself
            self.fleet.supervisor.kill(worker)
        self.instances.lost(worker)
        if role == "trainer":
            self.training.trainer_lost(worker, reason)
        elif role == "sandbox":
            self._action_body.worker_lost(worker, reason)
        else:
            self.rollout.engine_lost(worker, reason)

    def is_operator(self, tenant: TenantId) -> bool:
        """The first tenant runs the service."""
        return tenant == self.settings.tenants[0]

    def workers_by_role(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {"engine": [], "trainer": [], "sandbox": []}
        for worker, role in sorted(self._roles.items()):
            if role != "agent":
                found[role].append(worker)
        return found

    def broken_engine(self, model: str, tenant: TenantId) -> str | None:
        """Why nothing can be sampled from a base model, if no engine of it runs and every one fails to start."""
        if any(record.runs(model) for record in self.brain.rollout.books.instances):
            return None
        if self.instances.starting(model):
            return None
        place = [base.name for base in self.bases].index(model)
        kinds = (f"engine-{place}-", f"local-{place}-", f"serving-{place}-")
        names = [name for name in self.fleet.supervisor.names() if any(k in name for k in kinds)]
        return self._broken(names, f"model {model}: no engine starts", tenant)

    def broken_trainer(self, tenant: TenantId) -> str | None:
        """Why nothing can be trained, if no trainer runs and every one fails to start."""
        if self.workers_by_role()["trainer"]:
            return None
        names = [name for name in self.fleet.supervisor.names() if "trainer-" in name]
        return self._broken(names, "no trainer starts", tenant)

    def _broken(self, names: Sequence[str], what: str, tenant: TenantId) -> str | None:
        failed = self.fleet.supervisor.failed()
        if not names or any(name not in failed or failed[name].deaths < 2 for name in names):
            return None
        why = (
            failed[names[0]].said if self.is_operator(tenant) else "the operator's status says why"
        )
        return f"{what}: {why}"

    def gauges(self) -> dict[str, float]:
        """For metrics and status."""
        waiting = self.training.waiting()
        roles = self.workers_by_role()
        held_cpu_s, held_s = self.loop_watch.longest()
        return {
            "loop_longest_cpu_s": held_cpu_s,
            "loop_longest_lag_s": held_s,
            "engines": len(roles["engine"]),
            "trainers": len(roles["trainer"]),
            "nodes": len(self.fleet.nodes.names()),
            "active_sessions": self.sessions.active(),
            "open_models": len(waiting),
            "waiting_operations": sum(waiting.values()),
            "sampling_sessions": len(self.sampling.sessions()),
            **self.actions.gauges(),
            **self.brain.gauges(),
            **self._serving_gauges(),
        }

    def _serving_gauges(self) -> dict[str, float]:
        """What users of the served model got, what its workers saw of it, and what is lent."""
        rollout, now_s = self.rollout, asyncio.get_running_loop().time()
        kept = {} if rollout.promise is None else rollout.promise.gauges(now_s)
        return kept | ({} if rollout.lending is None else rollout.lending.gauges())

    def serving(self) -> dict[str, Any] | None:
        """The promise of the served model and how it was kept, minute by minute; None if none is served."""
        promise, lending = self.rollout.promise, self.rollout.lending
        if promise is None:
            return None
        return {
            "model": promise.model,
            "slo": asdict(promise.slo),
            "minutes": promise.minutes(),
            "lent": {} if lending is None else lending.lent(),
            "not_lent": {} if lending is None else dict(lending.refusals),
        }

    def worker_gauges(self) -> dict[WorkerId, dict[str, float]]:
        """What each engine said of itself last."""
        return self.rollout.gauges

    # ---- operations and futures ----
    def _operation_finished(
        self, model: TrainedModel, operation: Operation, payload: bytes
    ) -> None:
        """Weights that were published can be sampled from."""
        if operation.kind is OpKind.SAVE:
            self.background.spawn(self.housekeeping.drop_unlisted_states(model))
        if operation.kind is not OpKind.PUBLISH:
            return
        publish = decode_publish(payload)
        if publish.sampling_session is not None:
            self.sampling.add_session(sampling_session_of(model, operation, publish))
            self.background.spawn(self.housekeeping.trim_versions(model))
        self.rollout.published(
            *(publish.version, model.base_model, self.sessions.job_of(model.session)),
            line=model.model,
            adapter=model.lora.rank > 0,
            sampled=publish.sampling_session is not None,
        )

    async def _adopt_versions(self) -> None:
        """Tell the weight director of the versions that were named before this start."""
        for held in await self.store.call(known_versions):
            job = self.sessions.job_of(SessionId(held.session))
            self.rollout.published(
                *(held.version, held.base_model, job),
                line=held.line,
                adapter=held.adapter,
                sampled=False,
            )

    async def outcome(self, tenant: TenantId, request: RequestId, hold_s: float) -> Outcome | None:
        """How a request ended, or None if it has not within `hold_s`. Not the tenant's: NotFoundError."""
        holder = self.board.tenant_of(request)
        if holder is None:
            return await self._stored_outcome(tenant, request)
        if holder != tenant:
            raise _not_yours(request)
        if not await self.board.wait(request, hold_s):
            return None
        return self.board.recent(request) or await self._stored_outcome(tenant, request)

    async def _stored_outcome(self, tenant: TenantId, request: RequestId) -> Outcome:
        """Of a request that is not on the board: it ended a while ago, or before the last start."""
        table = samples if request.startswith("sm-") else operations
        kind = sa.literal(SAMPLE) if table is samples else operations.c.kind
        columns = table.c
        query = sa.select(
            columns.tenant, kind.label("kind"), columns.result, columns.error, columns.owner
        ).where(columns.request == request)
        row = await self.store.call(lambda c: c.execute(query).first())
        if row is None or row.tenant != tenant:
            raise _not_yours(request)
        owner = None if row.owner is None else FaultOwner(row.owner)
        return Outcome(row.kind, row.result, row.error, owner)

    async def end_session(self, session: SessionId, status: dict[str, Any], reason: str) -> None:
        """Its models stop training; what they saved stays."""
        await self.sessions.end(session, status)
        self.jobs.session_ended(session, status, reason)
        for model in self.training.models():
            if model.session == session:
                await self.training.close_model(model.model, reason)
        await self.housekeeping.drop_sampling_sessions(session)


def _write_new(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def _node_of(agent: WorkerId) -> NodeId:
    return NodeId(agent.removeprefix("agent:"))


def _not_yours(request: RequestId) -> NotFoundError:
    return NotFoundError(f"request_id: {request!r} is not a request of yours, or has expired")


class _Recording:
    """Where recorded events go, if anybody asked."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._files: list[BinaryIO] = []

    def of(self, name: str, controller: Any) -> Any:
        """The controller itself, or one that writes `<record>.<name>.jsonl`, anew at each start."""
        if self._path is None:
            return controller
        file = self._path.with_name(f"{self._path.name}.{name}.jsonl").open("wb")
        self._files.append(file)
        write: Callable[[bytes], Any] = file.write
        return RecordedController(controller, write)

    def close(self) -> None:
        for file in self._files:
            file.close()
