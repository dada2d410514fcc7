"""The control plane of one service: its parts put together, started, watched and stopped."""

import asyncio
import contextlib
import time
from functools import partial
from pathlib import Path
from typing import Any

from slackwater.control.actions.broker import ActionBroker
from slackwater.control.actions.settings import BrokerSettings
from slackwater.control.brain import Brain
from slackwater.control.coschedule.events import NodeLost
from slackwater.control.lending.lender import Lender
from slackwater.control.operations.controller import OperationsController
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.model.ids import InstanceId, JobId, NodeId, RequestId, SessionId, TenantId, WorkerId
from slackwater.runtime.bodies.actions import ActionsBody
from slackwater.runtime.bodies.drivers import DriverParts, DriversBody
from slackwater.runtime.bodies.lending import LendingBody, Offer
from slackwater.runtime.bodies.operations import OperationsBody, OperationsParts
from slackwater.runtime.bodies.phases import PhaseHands, PhasesBody
from slackwater.runtime.bodies.rehearsal import rehearse, rehearse_sharing
from slackwater.runtime.bodies.rollout import RolloutBody
from slackwater.runtime.bodies.state_moves import StateMoves
from slackwater.runtime.bodies.vital_controller import VitalController
from slackwater.runtime.launch.agents import JoinAddress
from slackwater.runtime.launch.fleet import Fleet
from slackwater.runtime.launch.nodes import agent_name
from slackwater.runtime.launch.worker_plans import WorkerPlans, reward_models
from slackwater.runtime.net.background import Background
from slackwater.runtime.net.hub import WorkerHub
from slackwater.runtime.recording import Recording
from slackwater.runtime.services.actions import ActionService
from slackwater.runtime.services.breakdowns import Breakdowns
from slackwater.runtime.services.fair_work import FairWork
from slackwater.runtime.services.finishing import Finishing
from slackwater.runtime.services.helper_processes import HelperProcesses
from slackwater.runtime.services.housekeeping import Household, Housekeeping
from slackwater.runtime.services.instances import InstanceService, Premises
from slackwater.runtime.services.jobs import Jobs
from slackwater.runtime.services.kept_promise import KeptPromise
from slackwater.runtime.services.loop_shares import LoopShares
from slackwater.runtime.services.loop_watch import LoopWatch
from slackwater.runtime.services.meters import Meters
from slackwater.runtime.services.outcomes import Outcomes
from slackwater.runtime.services.phases import PhaseService, coscheduled_places, places_of
from slackwater.runtime.services.publications import Publications
from slackwater.runtime.services.sampling import SamplingService
from slackwater.runtime.services.sessions import Sessions
from slackwater.runtime.services.submissions import Submissions
from slackwater.runtime.services.tenants import Tenants
from slackwater.runtime.services.turn_shares import TurnShares
from slackwater.runtime.services.workers import Hearers, Workers
from slackwater.runtime.settings import SILENT_AFTER_S, ServiceSettings
from slackwater.runtime.store.base_models import BaseModel, BaseModels
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.future_board import FutureBoard
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.runtime.store.versions import VersionShelf
from slackwater.runtime.store.write_ahead import WriteAhead
from slackwater.wire.agent import PrefetchStates
from slackwater.wire.certificate import Certificate

ROLLOUT_SETTINGS = RolloutSettings(lease_s=SILENT_AFTER_S)  # without a configuration file


class ControlPlane:
    """Everything behind the HTTP face. `failed` is set when something died that must not."""

    def __init__(
        self, settings: ServiceSettings, state: StateDirectory, shelf: VersionShelf
    ) -> None:
        self.settings = settings
        self.brokers_actions = settings.brokers_actions
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
        self.workers = Workers()
        self.loop_shares = LoopShares(len(self.tenants.names()))
        self.hub = WorkerHub(
            self.workers,
            secret,
            silent_after_s=SILENT_AFTER_S,
            listen=file.address(),
            context=None if self._certificate is None else self._certificate.context(),
            crowded=self.loop_shares.crowded,
        )
        judges = reward_models(settings)
        plans = WorkerPlans(settings, self.bases, judges)
        self._model_folders = self.bases.directories() | judges.directories()
        given = settings.residency
        budgets = None if given is None else given.environment()
        models = self._model_folders
        self.fleet = Fleet(file, state, self.hub, models, plans.of, secret, budgets)
        self.sessions = Sessions(self.store, settings.session_silent_after_s)
        self._recording = Recording(settings.record)
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
        self.loop_watch = LoopWatch()
        self.helpers = HelperProcesses("slackwater.serve.http.helper")
        self.sampling = SamplingService(
            *(self.store, self.board, self.background, self.rollout, self.shares),
            (self.loop_shares, self.fair_work),
            self.sessions.job_of,
        )
        self._publications = Publications(
            self.rollout, self.sampling, self.sessions, self.background
        )
        self._state_moves = StateMoves(self.hub, self.fleet.nodes.node_of)
        self.training = OperationsBody(
            OperationsParts(
                *(self.store, self.board, self.hub, state, self.bases, self.background),
                *(self.rollout.devices, self._state_moves),
                self.sessions.job_of,
                None if shared is None else self.rollout.feed,
                partial(self._coscheduled_node, "train"),
                lambda: self.brain.weights.routes.lead_elsewhere,
            ),
            operations_controller,
            self._vital("operations", operations_controller),
            Finishing(state, shelf),
            self._publications.finished,
            settings.max_waiting_bytes // len(names),
        )
        self.housekeeping = Housekeeping(
            Household(
                *(settings, self.store, state, shelf, self.sessions),
                *(self.sampling, self.training, self.rollout, self.jobs, self.end_session),
            )
        )
        self._publications.housekeeping = self.housekeeping
        broker = ActionBroker(BrokerSettings(max_waiting=settings.max_waiting_actions))
        ahead = WriteAhead(self.store, self.background)
        self._action_body = ActionsBody(self.hub, ahead, self._vital("actions", broker))
        self.actions = ActionService(
            *(self.store, ahead, self.background, self._action_body),
            *(broker, settings.results_kept_s),
        )
        self.outcomes = Outcomes(self.store, self.board)
        self.workers.hearers = Hearers(
            *(self.fleet, self.rollout, self.training, self._action_body, self.instances),
            self._node_lost,
        )
        self._breakdowns = Breakdowns(
            *(self.fleet, self.bases, self.brain.rollout, self.instances, self.workers)
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
        await self._publications.adopt(self.store, self.bases)
        await self.training.adopt()
        await self.sampling.adopt()
        if self.brokers_actions:
            await asyncio.to_thread(rehearse)
        await self.actions.adopt()
        self.background.spawn(self.housekeeping.run())
        self.state.write_models(self._model_folders)
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
            self._prefetch,
        )
        phases.body = self.rollout.phases = PhasesBody(tuple(places_of(self._places)), hands)

    def _prefetch(self, training: list[JobId], rolling: list[JobId]) -> None:
        """Let the agents of these jobs' models' nodes bring states up, where they keep any: those of jobs that train now, then of those that
        train next."""
        if not self._state_moves.nodes:
            return
        hints: dict[NodeId, PrefetchStates] = {}
        for job in (*training, *rolling):
            for worker, models in self.training.models_by_trainer(job).items():
                node = self.fleet.nodes.node_of(worker)
                if node is not None and node in self._state_moves.nodes:
                    hint = hints.setdefault(node, PrefetchStates([], []))
                    hint.models.extend(models)
                    hint.holding.extend(models if job in training else ())
        for node, hint in hints.items():
            self.hub.send(agent_name(node), hint)

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

    def _node_lost(self, node: NodeId) -> None:
        """Its agent is gone: the co-scheduler has one place less in each pool that it was in."""
        if self.phases is None:
            return
        for pool in ("rollout", "train"):
            if (place := self._places.get((pool, node))) is not None:
                self.rollout.feed(NodeLost(asyncio.get_running_loop().time(), place))

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
        self.workers.stopping = True
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

    # ---- questions ----
    def is_operator(self, tenant: TenantId) -> bool:
        """The first tenant runs the service."""
        return tenant == self.settings.tenants[0]

    def why_paused(self, request: RequestId) -> str | None:
        """Why nothing is done about a request for now; None where something is."""
        job = self.sampling.job_of(request) or self.training.job_of(request)
        return None if self.phases is None or job is None else self.phases.why_paused(job)

    def broken_engine(self, model: str, tenant: TenantId) -> str | None:
        """Why nothing can be sampled from a base model, as far as the tenant may know."""
        return self._breakdowns.of_engines(model, fully=self.is_operator(tenant))

    def broken_trainer(self, tenant: TenantId) -> str | None:
        """Why nothing can be trained, as far as the tenant may know."""
        return self._breakdowns.of_trainers(fully=self.is_operator(tenant))

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
