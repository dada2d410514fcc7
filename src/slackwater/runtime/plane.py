"""The control plane of one service: its parts put together, started, watched and stopped."""

import asyncio
from functools import partial
from typing import Any

from slackwater.control.actions.broker import ActionBroker
from slackwater.control.actions.settings import BrokerSettings
from slackwater.control.coschedule.events import NodeLost
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.model.ids import InstanceId, JobId, NodeId, RequestId, SessionId, TenantId, WorkerId
from slackwater.model.instance import InstanceKind
from slackwater.model.operation import Operation
from slackwater.model.placement import place_devices
from slackwater.model.session import SamplingSession, TrainedModel
from slackwater.runtime.executors.actions import ActionExecutor
from slackwater.runtime.executors.drivers import DriverExecutor
from slackwater.runtime.executors.engines import EngineExecutor, EngineHooks
from slackwater.runtime.executors.permits import DecisionClock, PermitExecutor, PhaseCallbacks
from slackwater.runtime.executors.serving import Offer, ServingExecutor
from slackwater.runtime.executors.state_moves import StateMoves
from slackwater.runtime.executors.trainers import TrainerExecutor
from slackwater.runtime.executors.warm_up import warm_up_broker, warm_up_coscheduler
from slackwater.runtime.fleet_controller import new_fleet_controller
from slackwater.runtime.launch.agents import JoinAddress
from slackwater.runtime.launch.fleet import LaunchedFleet
from slackwater.runtime.launch.launch_plan import LaunchPlan
from slackwater.runtime.launch.node_keys import NodeKeys
from slackwater.runtime.launch.nodes import agent_name
from slackwater.runtime.launch.worker_plans import WorkerPlans, reward_models
from slackwater.runtime.live_driver import live_driver, loop_time
from slackwater.runtime.net.background import Background
from slackwater.runtime.net.hub import WorkerHub
from slackwater.runtime.recording import Recording
from slackwater.runtime.services.actions import ActionService
from slackwater.runtime.services.breakdowns import Breakdowns
from slackwater.runtime.services.fair_work import FairWork
from slackwater.runtime.services.finishing import RequestFinisher
from slackwater.runtime.services.helper_processes import HelperProcesses
from slackwater.runtime.services.housekeeping import Housekeeping
from slackwater.runtime.services.instances import InstanceService
from slackwater.runtime.services.jobs import Jobs
from slackwater.runtime.services.loop_shares import LoopShares
from slackwater.runtime.services.loop_watch import LoopWatch
from slackwater.runtime.services.meters import Meters
from slackwater.runtime.services.open_actions import OpenActions
from slackwater.runtime.services.outcomes import RequestOutcomes
from slackwater.runtime.services.phases import (
    PhaseService,
    fleet_nodes_of,
    locate_deployment,
    name_coscheduled_nodes,
)
from slackwater.runtime.services.publications import Publications
from slackwater.runtime.services.rentals import RentalHooks, RentalService
from slackwater.runtime.services.sampling import SamplingService
from slackwater.runtime.services.sessions import Sessions
from slackwater.runtime.services.slo_tracker import SloTracker
from slackwater.runtime.services.submissions import Submissions
from slackwater.runtime.services.tenant_queues import TenantQueues
from slackwater.runtime.services.tenants import Tenants
from slackwater.runtime.services.turn_shares import TurnShares
from slackwater.runtime.services.workers import Workers
from slackwater.runtime.services.workload_traces import WorkloadTraces
from slackwater.runtime.settings import SILENT_AFTER_S, ServiceSettings
from slackwater.runtime.store.assignments import AssignmentStore
from slackwater.runtime.store.base_models import BaseModel, BaseModels
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.future_board import FutureBoard, RequestOutcome
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.runtime.store.versions import VersionShelf
from slackwater.runtime.store.write_ahead import WriteAhead
from slackwater.timeline.spans import PermitSpans
from slackwater.wire.agent import PrefetchStates
from slackwater.wire.certificate import Certificate

_RETURN_S = 20.0  # engines that outlived the last control plane dial four times a second
ROLLOUT_SETTINGS = RolloutSettings(lease_s=SILENT_AFTER_S)  # without a configuration file


class ControlPlane:
    """Everything behind the HTTP face. `failed` is set when something died that must not."""

    def __init__(
        self,
        settings: ServiceSettings,
        state: StateDirectory,
        shelf: VersionShelf,
        url: str | None = None,
    ) -> None:
        """At `url` the drivers of jobs find the service."""
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
        self.traces = WorkloadTraces(state.root / "traces")
        self.meters = Meters()
        self.board = FutureBoard(self.meters.record_request)
        self.background = Background(lambda error: self.failed.set())
        self.sessions = Sessions(self.store, settings.session_silent_after_s)
        self._recording = Recording(settings.record)
        self._served = settings.serving
        self._places = name_coscheduled_nodes(*settings.coscheduled_nodes)
        sizes = settings.coscheduled_sizes
        self._sizes = dict(zip(("rollout", "train"), sizes, strict=True))
        self.controller = new_fleet_controller(settings)
        clock = DecisionClock()
        self.runtime = live_driver(
            self.controller,
            around=None if settings.coschedule is None else clock,
            record=self._recording.writer("fleet"),
            on_failure=self.failed.set,
        )
        self._open_fleet()
        self._open_engines()
        self._open_jobs(clock, url)
        self._open_sampling()
        self._open_training()
        self._open_actions()
        self._open_rentals()
        self.outcomes = RequestOutcomes(self.store, self.board)
        self.workers = Workers(
            self.fleet,
            self.rollout,
            self.training,
            self._action_executor,
            self.instances,
            self.rentals.record_join,
            self._node_lost,
        )
        self._breakdowns = Breakdowns(
            self.fleet, self.bases, self.controller.rollout, self.instances, self.workers
        )

    # ---- the parts, in the order in which they need each other ----
    def _open_fleet(self) -> None:
        """Nodes, workers and the connections to them."""
        settings, state = self.settings, self.state
        keys, file = NodeKeys(state), settings.whole_fleet
        launch_plan = LaunchPlan(keys)
        self._certificate = Certificate.kept_in(state.root) if file.encrypted else None
        self.hub = WorkerHub(
            launch_plan,
            before_send=launch_plan.authorize,
            silent_after_s=SILENT_AFTER_S,
            listen=file.address(),
            port_file=state.root / "hub.port",
            context=None if self._certificate is None else self._certificate.context(),
        )
        judges = reward_models(settings)
        self._plans = WorkerPlans(settings, self.bases, judges)
        self._model_folders = self.bases.directories() | judges.directories()
        given = settings.residency
        budgets = None if given is None else given.environment()
        models = self._model_folders
        self.fleet = LaunchedFleet(
            *(file, state, self.hub, models, self._plans, launch_plan, keys, budgets),
            runtime=self.runtime,
            allocator=self.controller.allocator,
            store=AssignmentStore(self.store, self.background),
        )
        self._state_moves = StateMoves(self.hub, self.fleet.nodes.node_of)

    def _offers(self) -> dict[str, Offer]:
        """What may borrow from the served model: the weights of every other base model."""
        served = None if self._served is None else self._served.model
        others = [base for base in self.bases if base.name != served]
        return {base.name: Offer(base.version, base.uri) for base in others}

    def _open_engines(self) -> None:
        served, lending, promise = self._served, None, None
        if served is not None:
            promise = SloTracker(served.model, served.slo, loop_time(), self.traces.record_served)
            lending = ServingExecutor(self.runtime, self.hub.send, self._offers(), promise.is_met)
        hooks = EngineHooks(
            self._release, self._drop_version, partial(self._find_coscheduled_node, "rollout")
        )
        self.rollout = EngineExecutor(
            self.runtime,
            self.hub,
            hooks,
            meters=self.meters,
            lending=lending,
            slo=promise,
        )
        self.instances = InstanceService(
            self.controller,
            self.rollout,
            self.fleet.supervisor,
            spawn=self.fleet.spawn,
            engine_arguments=self._plans.engine_arguments,
            logs=self.state.logs,
        )

    def _open_jobs(self, clock: DecisionClock, url: str | None) -> None:
        """Jobs, their drivers, and the permits of those that share nodes."""
        feed, shared = self.runtime.feed, self.settings.coschedule
        self.jobs = Jobs(
            self.store, self.sessions, self.controller.jobs, feed, self.settings.tenants[0]
        )
        self.drivers = DriverExecutor(
            store=self.store,
            folder=self.state.root / "jobs",
            driver=self.runtime,
            spawn=self.background.spawn,
            key=self._key_of_job,
            end_sessions=self._end_sessions,
            url=url,
        )
        self.submissions = Submissions(
            self.store,
            self.controller,
            feed,
            self.drivers,
            lambda: [base.name for base in self.bases],
        )
        self.phases: PhaseService | None = None
        if shared is not None:
            places = fleet_nodes_of(self._places)
            callbacks = PhaseCallbacks(self._end_refused, self._phases_changed, self._prefetch)
            spans = PermitSpans(tuple(places), loop_time(), self._share)
            permits = PermitExecutor(self.runtime, spans, callbacks, clock)
            self.phases = PhaseService(shared, self.controller, feed, places, permits)

    def _open_sampling(self) -> None:
        names = self.tenants.names()
        self.shares = TurnShares(self.settings.max_live_turns, names)
        loop_shares = LoopShares(len(names))
        self.fair_work, self.queues = FairWork(loop_shares), TenantQueues(loop_shares)
        self.loop_watch = LoopWatch()
        self.helpers = HelperProcesses("slackwater.serve.http.helper")
        self.sampling = SamplingService(
            self.store,
            self.board,
            self.background,
            self.rollout,
            self.shares,
            (self.queues, self.fair_work),
            self.sessions.job_of,
        )

    def _open_training(self) -> None:
        """Operations, the weights that they publish, and what is tidied up after them."""
        settings, state, shelf = self.settings, self.state, self.shelf
        self.training = TrainerExecutor(
            self.runtime,
            self.controller.operations,
            store=self.store,
            board=self.board,
            hub=self.hub,
            state=state,
            bases=self.bases,
            background=self.background,
            moves=self._state_moves,
            job_of=self.sessions.job_of,
            node_of=partial(self._find_coscheduled_node, "train"),
            stock=lambda: self.controller.weights.routes.lead_elsewhere,
            finisher=RequestFinisher(state, shelf),
            finished=self._record_finished_operation,
            max_payload_bytes=settings.max_waiting_bytes // len(self.tenants.names()),
        )
        self.housekeeping = Housekeeping(
            settings=settings,
            store=self.store,
            state=state,
            shelf=shelf,
            sessions=self.sessions,
            sampling=self.sampling,
            operations=self.training,
            rollout=self.rollout,
            jobs=self.jobs,
            traces=self.traces,
            end_session=self.end_session,
        )
        self._publications = Publications(
            self.rollout, self.sampling, self.sessions, self.background, self.housekeeping
        )

    def _record_finished_operation(
        self, model: TrainedModel, operation: Operation, payload: bytes
    ) -> None:
        self._publications.record_operation(model, operation, payload)

    def _open_actions(self) -> None:
        settings, names = self.settings, self.tenants.names()
        most = settings.max_waiting_actions
        limits = settings.limits.table(names, settings.tenants[0], most)
        broker = ActionBroker(BrokerSettings(max_waiting=most, tenants=limits))
        is_shared = len(names) > 1
        ahead = WriteAhead(self.store, self.background)
        opened = OpenActions(self.store, ahead, self.background, names)
        record = self._recording.writer("actions")
        self._action_executor = ActionExecutor(
            self.hub,
            ahead,
            live_driver(broker, record=record, on_failure=self.failed.set),
            opened,
            needs_isolation=is_shared and not settings.trust_tenants,
        )
        self.actions = ActionService(
            self.store,
            self.background,
            self._action_executor,
            broker,
            opened,
            results_kept_s=settings.results_kept_s,
            is_shared=is_shared,
        )

    def _open_rentals(self) -> None:
        """Nodes that providers rent; last, since these commands were others' to ignore."""

        def others(rented: tuple[NodeId, ...]) -> int:
            specs = (record.spec for record in self.controller.rollout.books.instances)
            remote = [spec for spec in specs if spec.kind is not InstanceKind.LOCAL]
            return sum(spec.node not in rented for spec in remote)

        self.rentals = RentalService(
            self.settings.whole_fleet,
            self.state.root / "rentals",
            RentalHooks(
                lambda node, pool: self.join_address().token(node, pool),
                lambda node, in_s: self.workers.node_leaving(node, in_s),
                others,
            ),
            self.runtime,
            fleet_nodes_of(self._places),
        )

    def _key_of_job(self, job: JobId) -> str:
        tenant, _, name = job.partition("/")
        return self.tenants.job_key(TenantId(tenant), name)

    async def _end_sessions(self, job: JobId, why: str) -> None:
        """What a driver that is gone had open."""
        for session in self.sessions.live_sessions(job):
            status = {"type": "cancelled", "detail": why}
            await self.end_session(session, status, f"session {session} ended: {why}")

    def _release(self, worker: WorkerId) -> None:
        """The manager lets an instance go: a process ends, a loan's connection does."""
        if self.rollout.lending is not None and self.rollout.lending.is_loan(worker):
            self.hub.hang_up(worker)
        else:
            self.instances.release(worker)

    def _drop_version(self, version: str) -> None:
        self.background.spawn(asyncio.to_thread(self.shelf.drop, version))

    def _phases_changed(self) -> None:
        if self.phases is not None:
            self.phases.save_soon(self.store, self.background)

    async def start(self) -> None:
        """Open the store, take over what it has, and start the workers."""
        await self.store.open()
        await self.hub.start(self.workers)
        self.rollout.register_tenants(self.tenants.names())
        if self.phases is not None and self.settings.coschedule is not None:
            await asyncio.to_thread(warm_up_coscheduler, self.settings.coschedule)
            await self.phases.adopt(self.store)
        await self.jobs.adopt(loop_time(), await self.submissions.read())
        await self._publications.adopt(self.store, self.bases)
        await self.training.adopt()
        await self.sampling.adopt()
        if self.brokers_actions:
            await asyncio.to_thread(warm_up_broker)
        await self.actions.adopt()
        self.background.spawn(self.housekeeping.run())
        self.state.write_models(self._model_folders)
        await self.fleet.start(self._certificate)
        self.rentals.start()
        models = [base.name for base in self.bases]
        listed = self.settings.instances
        self.rollout.returned = self.fleet.returning.settle_engine
        self.background.spawn(self._resume())
        self.instances.keep_running(
            {InstanceId(entry.name): entry.request(models) for entry in listed}
        )
        if self.drivers.url is not None:
            await self.submissions.adopt_drivers()

    async def _resume(self) -> None:
        """Go on with unfinished turns, once the engines that have their tokens are back."""
        await self.fleet.returning.wait(_RETURN_S)
        self.sampling.resume()

    def _prefetch(self, training: list[JobId], rolling: list[JobId]) -> None:
        """Have agents load the states of jobs that train now, then of jobs that train next."""
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

    def _share(self, place: NodeId) -> float:
        """How much of its node a co-scheduled place is."""
        devices = place_devices(place)
        whole = self._sizes[place.partition("-")[0]].devices
        return 1.0 if devices is None else len(devices) / whole

    def _find_coscheduled_node(self, pool: str, worker: WorkerId) -> NodeId | None:
        """The co-scheduler's name of the node that a worker is on, as one of a pool."""
        node = self.fleet.nodes.node_of(worker)
        place = None if node is None else self._places.get((pool, node))
        return None if place is None else locate_deployment(place, worker, self._sizes[pool])

    def _node_lost(self, node: NodeId) -> None:
        """Its agent is gone: the co-scheduler has one place less in each pool that it was in."""
        self.rentals.record_loss(node)
        if self.phases is None:
            return
        for pool in ("rollout", "train"):
            if (place := self._places.get((pool, node))) is not None:
                self.runtime.feed(NodeLost(loop_time(), place))

    def _end_refused(self, job: JobId, reason: str) -> None:
        """A job that can never run is told so, whatever it has waiting."""
        for session in self.sessions.live_sessions(job):
            status = {"reason": {"type": "errored"}}
            self.background.spawn(self.end_session(session, status, f"refused: {reason}"))

    def release_waiters(self) -> None:
        """Answer the long polls that are held, so that a stop need not cut them off."""
        self.board.close()
        self.sampling.finished.close()
        self.actions.close()
        if self.phases is not None:
            self.phases.executor.close()

    async def stop(self) -> None:
        """Leave everything durable; what was under way goes on after the next start."""
        await self.drivers.close()
        self.runtime.close()
        if self.phases is not None:
            self.phases.executor.close()
        self.workers.stopping = True
        self.actions.close()
        self._action_executor.close()
        self.housekeeping.stop()
        await self.hub.close()
        await self.instances.close()
        await self.rentals.close()
        await self.fleet.close()
        await self.background.drain(5.0)
        self.fair_work.close()
        self.helpers.close()
        await self.jobs.save()
        await self.traces.save()
        await self.store.close()
        self._recording.close()

    def join_address(self) -> JoinAddress:
        """What an agent of another machine must know to join."""
        return self.fleet.join_address(self._certificate)

    # ---- questions ----
    def is_operator(self, tenant: TenantId) -> bool:
        """The first tenant runs the service."""
        return tenant == self.settings.tenants[0]

    async def outcome(
        self, tenant: TenantId, request: RequestId, hold_s: float
    ) -> RequestOutcome | None:
        """How a request ended; what waits for a model that no engine serves and none will ends
        with the reason.
        """
        outcome = await self.outcomes.find(tenant, request, hold_s)
        if outcome is None and self.fail_unserved(self.sampling.session_of(request)):
            outcome = await self.outcomes.find(tenant, request, hold_s)
        return outcome

    def fail_unserved(self, session: SamplingSession | None) -> bool:
        """End what waits for a model that no engine serves and none will, with the reason."""
        if session is None:
            return False
        why = self.broken_engine(session.base_model, session.tenant)
        if why is not None:
            self.sampling.fail_all(session, why)
        return why is not None

    def pause_reason(self, request: RequestId) -> str | None:
        """Why nothing is done about a request for now; None where something is."""
        job = self.sampling.job_of(request) or self.training.job_of(request)
        return None if self.phases is None or job is None else self.phases.pause_reason(job)

    def broken_engine(self, model: str, tenant: TenantId) -> str | None:
        """Why nothing can be sampled from a base model, as far as the tenant may know."""
        return self._breakdowns.engine_failure(model, fully=self.is_operator(tenant))

    def broken_trainer(self, tenant: TenantId) -> str | None:
        """Why nothing can be trained, as far as the tenant may know."""
        return self._breakdowns.trainer_failure(fully=self.is_operator(tenant))

    async def end_session(self, session: SessionId, status: dict[str, Any], reason: str) -> None:
        """Its models stop training; what they saved stays."""
        await self.sessions.end(session, status)
        self.jobs.record_session_end(session, status, reason)
        for model in self.training.models():
            if model.session == session:
                await self.training.close_model(model.model, reason)
        await self.housekeeping.drop_sampling_sessions(session)
