"""Runs a broker and a co-scheduler once, which loads their compiled code."""

from slackwater.control.actions import events
from slackwater.control.actions.broker import ActionBroker
from slackwater.control.coschedule.phase_events import PermitAsked, PermitReturned
from slackwater.control.coschedule.settings import CoscheduleSettings
from slackwater.control.fleet.controller import FleetController
from slackwater.control.jobs.events import JobEnded, JobSubmitted
from slackwater.model.action import ActionSpec, WorkerCapacity
from slackwater.model.amounts import CORES, Amounts, Efficiency, Elastic, Need
from slackwater.model.ids import ActionId, JobId, NodeId, TenantId
from slackwater.model.job import JobTerms
from slackwater.model.placement import Phase


def warm_up_broker() -> None:
    """A few elastic actions on a few cores; nothing is run."""
    broker = ActionBroker()
    broker.handle(events.WorkerJoined(0.0, NodeId("n"), WorkerCapacity(cores=((0, 1, 2, 3),))))
    needs = (Need(CORES, Amounts.from_range(1, 4)),)
    elastic = Elastic(CORES, Efficiency.amdahl(0.9, 4))
    for number in range(6):
        spec = ActionSpec(
            ActionId(str(number)), JobId("j"), "k", needs, elastic=elastic, single_unit_s=1.0
        )
        broker.handle(events.ActionSubmitted(0.0, spec))


def warm_up_coscheduler(settings: CoscheduleSettings) -> None:
    """Three jobs arrive, take turns on a few nodes, and leave; nothing is run."""
    controller = FleetController(coscheduler=settings.new_coscheduler(2, 2))
    terms = JobTerms(iterations=50, slo=3.0)
    jobs = [JobId(f"rehearsed-{number}") for number in range(3)]
    for number, job in enumerate(jobs):
        profile = terms.profile(3.0 + number, 2.0, 0.5)
        controller.handle(JobSubmitted(0.1 * number, job, TenantId("t"), profile, terms))
    now_s = 1.0
    for iteration in range(2):
        for phase in (Phase.ROLLOUT, Phase.TRAIN):
            for job in jobs:
                now_s += 1.0
                controller.handle(PermitAsked(now_s, job, phase, iteration))
                managed = None if controller.phases is None else controller.phases.find(job)
                if managed is not None and managed.permit is not None:
                    back = PermitReturned(now_s + 0.5, job, managed.permit.client_number, 0.5)
                    controller.handle(back)
    for job in jobs:
        now_s += 1.0
        controller.handle(JobEnded(now_s, job, "finished"))
