"""The control plane of one service: composes its parts, starts and stops them.

The constructor builds the parts in the order in which they need each other; `start` recovers what
the store has, and then starts the workers. Nothing here decides: the fleet controller does.
"""

import asyncio
from functools import partial
from typing import Any

from slackwater.control.actions.broker import ActionBroker
from slackwater.control.actions.broker_state import BrokerSettings
from slackwater.control.coschedule.events import NodeLost
from slackwater.control.rollout.events import OwnersNamed
from slackwater.model.ids import InstanceId, JobId, NodeId, RequestId, SessionId, TenantId, WorkerId
from slackwater.model.session import SamplingSession
from slackwater.runtime.executors.actions import ActionExecutor
from slackwater.runtime.executors.drivers import DriverExecutor
from slackwater.runtime.executors.engines import EngineExecutor
from slackwater.runtime.executors.permits import DecisionClock, PermitExecutor
from slackwater.runtime.executors.serving import Offer, ServingExecutor
from slackwater.runtime.executors.state_moves import StateMoves
from slackwater.runtime.executors.trainers import TrainerExecutor
from slackwater.runtime.executors.warm_up import warm_up_broker, warm_up_coscheduler
from slackwater.runtime.fleet_controller import new_fleet_controller
from slackwater.runtime.launch.fleet import LaunchedFleet
from slackwater.runtime.launch.launch_plan import LaunchPlan
from slackwater.runtime.launch.node_keys import NodeKeys
from slackwater.runtime.launch.worker_plans import WorkerPlans, reward_models
from slackwater.runtime.live_driver import Recording, live_driver, loop_time
from slackwater.runtime.net.background import Background
from slackwater.runtime.net.hub import WorkerHub
from slackwater.runtime.services.action_table import ActionTable
from slackwater.runtime.services.actions import ActionService
from slackwater.runtime.services.breakdowns import Breakdowns
from slackwater.runtime.services.coscheduled_nodes import CoscheduledNodes
from slackwater.runtime.services.finishing import RequestFinisher
from slackwater.runtime.services.helper_processes import HelperProcesses
from slackwater.runtime.services.housekeeping import Housekeeping
from slackwater.runtime.services.instances import InstanceService
from slackwater.runtime.services.jobs import Jobs
from slackwater.runtime.services.loop_shares import FairWork, LoopShares, TenantQueues
from slackwater.runtime.services.loop_watch import LoopWatch
from slackwater.runtime.services.meters import Meters
from slackwater.runtime.services.outcomes import find_outcome
from slackwater.runtime.services.phases import PhaseService
from slackwater.runtime.services.publications import Publications
from slackwater.runtime.services.rentals import RentalService
from slackwater.runtime.services.sampling import SamplingService
from slackwater.runtime.services.sessions import Sessions
from slackwater.runtime.services.slo_tracker import SloTracker
from slackwater.runtime.services.submissions import Submissions
from slackwater.runtime.services.tenants import Tenants, TurnShares
from slackwater.runtime.services.workers import Workers
from slackwater.runtime.services.workload_traces import WorkloadTraces
from slackwater.runtime.settings import SILENT_AFTER_S, ServiceSettings
from slackwater.runtime.store.base_models import BaseModel, BaseModels
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.facts import SavedFact
from slackwater.runtime.store.outcomes import FutureBoard, RequestOutcome, WriteAhead
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.runtime.store.versions import VersionShelf
from slackwater.timeline.spans import PermitSpans
from slackwater.wire.certificate import Certificate
from slackwater.wire.lending import is_loan

_RETURN_S = 20.0  # engines that outlived the last control plane reconnect four times a second


class ControlPlane:
    """Everything behind the HTTP API. `failed` is set when a part died that the service needs.

    A few callbacks lead to parts that are built later; they are methods or lambdas of the plane,
    and nothing calls them before `start`.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        state: StateDirectory,
        shelf: VersionShelf,
        url: str | None = None,
    ) -> None:
        """`url` is where the drivers of jobs reach the service; without it no job is submitted."""
        self.settings = settings
        self.brokers_actions = settings.brokers_actions
        self.state = state
        self.shelf = shelf
        self.bases = BaseModels(
            {name: BaseModel.read(name, path) for name, path in settings.models.items()},
            or_none=settings.only_actions,
        )
        self.tenants = Tenants.open(state, settings.tenants)
        most, names = settings.max_waiting_actions, self.tenants.names()
        self._limits = settings.limits.table(names, settings.tenants[0], most)
        self.failed = asyncio.Event()
        self.store = Store(settings.database_url or state.database_url, self.failed.set)
        self.traces = WorkloadTraces(state.root / "traces")
        self.meters = Meters()
        self.board = FutureBoard(self.meters.record_request)
        self.background = Background(lambda error: self.failed.set())
        self.sessions = Sessions(self.store, settings.session_silent_after_s)
        self._recording = Recording(settings.record)
        self._served = settings.serving
        self._coscheduled = CoscheduledNodes(settings.coscheduled_nodes, settings.coscheduled_sizes)
        self.controller = new_fleet_controller(settings)
        clock = DecisionClock()
        self.runtime = live_driver(
            self.controller,
            around=None if settings.coschedule is None else clock,
            record=self._recording.writer("fleet"),
            on_failure=self.failed.set,
        )
        self._build_fleet()
        self._build_engines()
        self._build_trainers()
        self._build_jobs(url)
        self._build_phases(clock)
        self._build_sampling()
        self._build_housekeeping()
        self._build_actions()
        self._build_rentals()
        self.workers = Workers(
            self.fleet,
            self.rollout,
            self.training,
            self._action_executor,
            self.instances,
            node_joined=self.rentals.record_join,
            node_lost=self._record_node_loss,
        )
        self.breakdowns = Breakdowns(
            self.fleet,
            self.bases,
            self.controller.rollout,
            self.instances,
            self.workers,
            settings.tenants[0],
        )

    # ---- the parts, in the order in which they need each other ----
    def _build_fleet(self) -> None:
        """Nodes, workers and the connections to them."""
        settings, state = self.settings, self.state
        keys, file = NodeKeys(state), settings.whole_fleet
        launch_plan, allocator = LaunchPlan(keys), self.controller.allocator
        certificate = Certificate.load_or_create(state.root) if file.encrypted else None
        self.hub = WorkerHub(
            launch_plan,
            before_send=launch_plan.authorize,
            silent_after_s=SILENT_AFTER_S,
            listen=file.address(),
            port_file=state.root / "hub.port",
            context=None if certificate is None else certificate.context(),
        )
        judges = reward_models(settings)
        self._plans = WorkerPlans(settings, self.bases, judges)
        self._model_folders = self.bases.directories() | judges.directories()
        self.fleet = LaunchedFleet(
            file,
            state,
            self.hub,
            self._model_folders,
            self._plans,
            launch_plan,
            keys,
            certificate=certificate,
            budgets={} if settings.residency is None else settings.residency.environment(),
            runtime=self.runtime,
            allocator=allocator,
            assignments=SavedFact(
                self.store, self.background, "device_assignments", allocator.assignments
            ),
        )

    def _build_engines(self) -> None:
        """Engines, the loans of a serving model's devices, and instances of the operator."""
        served, lending, slo = self._served, None, None
        if served is not None:
            slo = SloTracker(served.model, served.slo, loop_time(), self.traces.record_served)
            # Every other base model may borrow from the served one.
            offers = {
                base.name: Offer(base.version, base.uri)
                for base in self.bases
                if base.name != served.model
            }
            lending = ServingExecutor(self.runtime, self.hub.send, offers, slo.is_met)
        self.rollout = EngineExecutor(
            self.runtime,
            self.hub,
            release=self._release_instance,
            delete_version=self._delete_version,
            find_place=partial(self._find_place, "rollout"),
            turns_returned=self.fleet.returning.settle_engine,
            meters=self.meters,
            lending=lending,
            slo=slo,
        )
        self.instances = InstanceService(
            self.controller,
            self.rollout,
            self.fleet.supervisor,
            spawn=self.fleet.spawn,
            engine_arguments=self._plans.engine_arguments,
            logs=self.state.logs,
        )

    def _build_trainers(self) -> None:
        tenants = len(self.tenants.names())
        self.training = TrainerExecutor(
            self.runtime,
            self.controller.operations,
            store=self.store,
            board=self.board,
            hub=self.hub,
            state=self.state,
            bases=self.bases,
            background=self.background,
            moves=StateMoves(self.hub, self.fleet.nodes.node_of),
            job_of=self.sessions.job_of,
            node_of=partial(self._find_place, "train"),
            stock=lambda: self.controller.weights.routes.lead_elsewhere,
            finisher=RequestFinisher(self.state, self.shelf),
            finished=lambda *done: self._publications.record_operation(*done),
            limits=self._limits,
            max_payload_bytes=self.settings.max_waiting_bytes // tenants,
        )

    def _build_jobs(self, url: str | None) -> None:
        """Jobs of sessions, submitted jobs, and the drivers of those."""
        feed = self.runtime.feed
        self.jobs = Jobs(
            self.store, self.sessions, self.controller.jobs, feed, self.settings.tenants[0]
        )
        self.drivers = DriverExecutor(
            store=self.store,
            folder=self.state.root / "jobs",
            driver=self.runtime,
            spawn=self.background.spawn,
            key=self.tenants.key_of_job,
            end_sessions=self._end_sessions,
            url=url,
        )
        self.submissions = Submissions(self.store, self.controller, feed, self.drivers, self.bases)

    def _build_phases(self, clock: DecisionClock) -> None:
        """Permits of jobs that share nodes; none without a co-scheduler."""
        self.phases: PhaseService | None = None
        settings, nodes = self.settings.coschedule, self._coscheduled
        if settings is None:
            return
        spans = PermitSpans(tuple(nodes.fleet_nodes), loop_time(), nodes.share)
        executor = PermitExecutor(
            self.runtime,
            spans,
            clock,
            end_refused_job=self._end_refused_job,
            save_state=self._save_phases,
            prefetch=self.training.prefetch,
        )
        self.phases = PhaseService(
            settings,
            self.controller,
            self.runtime.feed,
            nodes.fleet_nodes,
            executor,
            self.store,
            self.background,
        )

    def _build_sampling(self) -> None:
        """Sample requests, and what shares the event loop's time between tenants."""
        names = self.tenants.names()
        self.shares = TurnShares(self.settings.max_live_turns, names)
        loop_shares = LoopShares(len(names))
        self.fair_work, self.queues = FairWork(loop_shares), TenantQueues(loop_shares)
        self.loop_watch = LoopWatch()
        self.helpers = HelperProcesses()
        self.sampling = SamplingService(
            self.store,
            self.board,
            self.background,
            self.rollout,
            self.shares,
            self.queues,
            self.fair_work,
            self.sessions.job_of,
        )

    def _build_housekeeping(self) -> None:
        """What expires, and what becomes of published weights."""
        self.housekeeping = Housekeeping(
            settings=self.settings,
            store=self.store,
            state=self.state,
            shelf=self.shelf,
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

    def _build_actions(self) -> None:
        """The action broker, which the fleet controller knows nothing of, and its workers."""
        settings, names = self.settings, self.tenants.names()
        most = settings.max_waiting_actions
        broker = ActionBroker(BrokerSettings(max_waiting=most, tenants=self._limits))
        is_shared = len(names) > 1
        ahead = WriteAhead(self.store, self.background)
        table = ActionTable(self.store, ahead, self.background, names)
        record = self._recording.writer("actions")
        self._action_executor = ActionExecutor(
            self.hub,
            ahead,
            live_driver(broker, record=record, on_failure=self.failed.set),
            table,
            needs_isolation=is_shared and not settings.trust_tenants,
        )
        self.actions = ActionService(
            self.store,
            self.background,
            self._action_executor,
            broker,
            table,
            results_kept_s=settings.results_kept_s,
            is_shared=is_shared,
        )

    def _build_rentals(self) -> None:
        """Nodes that providers rent. Hazard: after engines and permits, whose handlers of the same
        commands it replaces.
        """
        self.rentals = RentalService(
            self.settings.whole_fleet,
            self.state.root / "rentals",
            self.runtime,
            self._coscheduled.fleet_nodes,
            join_token=lambda node, pool: self.fleet.join_address().token(node, pool),
            leave=lambda node, in_s: self.workers.node_leaving(node, in_s),
            count_other_engines=self.instances.count_remote,
        )

    async def start(self) -> None:
        """Open the store, recover what it has, and start the workers.

        The hub listens first: agents that outlived the last control plane may join while the parts
        recover. Workers are started last.
        """
        await self.store.open()
        await self.hub.start(self.workers)
        owners = tuple(TenantId(name) for name in self.tenants.names())
        self.runtime.feed(OwnersNamed(loop_time(), owners))
        if self.phases is not None and self.settings.coschedule is not None:
            await asyncio.to_thread(warm_up_coscheduler, self.settings.coschedule)
            await self.phases.adopt()
        await self.jobs.adopt(loop_time(), await self.submissions.read())
        await self._publications.adopt(self.store, self.bases)
        await self.training.adopt()
        await self.sampling.adopt()
        if self.brokers_actions:
            await asyncio.to_thread(warm_up_broker)
        await self.actions.adopt()
        self.background.spawn(self.housekeeping.run())
        self.state.write_models(self._model_folders)
        await self.fleet.start()
        self.rentals.start()
        models = [base.name for base in self.bases]
        listed = self.settings.instances
        self.background.spawn(self._resume())
        self.instances.keep_running(
            {InstanceId(entry.name): entry.request(models) for entry in listed}
        )
        if self.drivers.url is not None:
            await self.submissions.adopt_drivers()

    async def _resume(self) -> None:
        """Resume unfinished turns once the engines that have their tokens are back."""
        await self.fleet.returning.wait(_RETURN_S)
        self.sampling.resume()

    def release_waiters(self) -> None:
        """Answer pending long polls now, so that the stop does not cut them off."""
        self.board.close()
        self.sampling.finished.close()
        self.actions.close()
        if self.phases is not None:
            self.phases.executor.close()

    async def stop(self) -> None:
        """Stop with everything durable; unfinished work continues after the next start."""
        await self.drivers.close()
        self.runtime.close()
        if self.phases is not None:
            self.phases.executor.close()
        self.workers.stop()
        self.actions.close()
        self._action_executor.close()
        self.housekeeping.stop()
        self.fleet.stop_restarts()
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

    # ---- callbacks of the parts ----
    def _find_place(self, pool: str, worker: WorkerId) -> NodeId | None:
        return self._coscheduled.locate(pool, self.fleet.nodes.node_of(worker), worker)

    async def _end_sessions(self, job: JobId, why: str) -> None:
        """End what a driver that is gone had open."""
        for session in self.sessions.live_sessions(job):
            status = {"type": "cancelled", "detail": why}
            await self.end_session(session, status, f"session {session} ended: {why}")

    def _end_refused_job(self, job: JobId, reason: str) -> None:
        """End the sessions of a job that can never run, and with them everything that waits."""
        for session in self.sessions.live_sessions(job):
            status = {"reason": {"type": "errored"}}
            self.background.spawn(self.end_session(session, status, f"refused: {reason}"))

    def _release_instance(self, worker: WorkerId) -> None:
        """End an instance that the manager releases: its process, or the connection of a loan."""
        if is_loan(worker):
            self.hub.hang_up(worker)
        else:
            self.instances.release(worker)

    def _delete_version(self, version: str) -> None:
        self.background.spawn(asyncio.to_thread(self.shelf.drop, version))

    def _save_phases(self) -> None:
        if self.phases is not None:
            self.phases.save_soon()

    def _record_node_loss(self, node: NodeId) -> None:
        """The agent of a node is gone, and with it the node's place in each pool."""
        self.rentals.record_loss(node)
        if self.phases is not None:
            for name in self._coscheduled.names_of(node):
                self.runtime.feed(NodeLost(loop_time(), name))

    # ---- for the HTTP API ----
    def is_operator(self, tenant: TenantId) -> bool:
        """The first tenant operates the service."""
        return tenant == self.settings.tenants[0]

    async def outcome(
        self, tenant: TenantId, request: RequestId, hold_s: float
    ) -> RequestOutcome | None:
        """How a request ended; None if it has not. A request for a model that no engine will ever
        serve ends with the reason.
        """
        find = partial(find_outcome, self.store, self.board, tenant, request, hold_s)
        outcome = await find()
        if outcome is None and self.fail_unserved(self.sampling.session_of(request)):
            outcome = await find()
        return outcome

    def fail_unserved(self, session: SamplingSession | None) -> bool:
        """End the requests of a session whose model no engine will ever serve."""
        if session is None:
            return False
        why = self.breakdowns.engine_failure(session.base_model, session.tenant)
        if why is not None:
            self.sampling.fail_all(session, why)
        return why is not None

    def pause_reason(self, request: RequestId) -> str | None:
        """Why a request is waiting for the co-scheduler; None if it is not."""
        job = self.sampling.job_of(request) or self.training.job_of(request)
        return None if self.phases is None or job is None else self.phases.pause_reason(job)

    async def end_session(self, session: SessionId, status: dict[str, Any], reason: str) -> None:
        """End a session: its models stop training, and what they saved stays."""
        await self.sessions.end(session, status)
        self.jobs.record_session_end(session, status, reason)
        for model in self.training.models():
            if model.session == session:
                await self.training.close_model(model.model, reason)
        await self.housekeeping.drop_sampling_sessions(session)
