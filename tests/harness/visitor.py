"""A job without terms that borrows the serving nodes of a simulated fleet."""

from slackwater.control.jobs.events import JobSubmitted
from slackwater.model.ids import JobId, TenantId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.sim.fleet.fleet import SimulatedFleet
from slackwater.sim.fleet.job import SimulatedJob


class Visitor:
    """Samples in bursts, and shares what there is: a session that nobody submitted terms for."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet
        self._bursts = 0
        spec = JobSpec(JobId("visitor"), 0.0, 1, 1.0, JobProfile(60.0, 1.0))
        self._job = SimulatedJob(spec, -1, spec.profile, samples_only=True)
        fleet.jobs[spec.job] = self._job

    def start(self) -> None:
        fleet = self._fleet
        fleet.tell(JobSubmitted(fleet.now_s, self._job.job, TenantId("guest")))
        self._burst()

    def _burst(self) -> None:
        fleet = self._fleet
        self._bursts += 1
        for number, tokens in enumerate(fleet.plan.lengths(fleet.seed, self._bursts)[:4]):
            trajectory = f"{self._job.job}.{self._bursts}.{number}"
            fleet.clients.ask(self._job, trajectory, tokens)
        if fleet.unsettled:
            fleet.after(fleet.wait_s(600.0), self._burst)
