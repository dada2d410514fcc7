"""The life of a job, and its account."""

from slackwater.control.jobs import commands as do
from slackwater.control.jobs import events as on
from slackwater.control.jobs.driver_events import DriverDue, DriverUndue
from slackwater.control.jobs.registry import JobRegistry
from slackwater.control.rollout.facts import TurnClosed, TurnOpened
from slackwater.model.ids import JobId, TenantId
from slackwater.model.job import JobProfile, JobTerms
from slackwater.model.job_life import JobStage

JOB, TENANT = JobId("job"), TenantId("mine")
PROFILE = JobProfile(100.0, 50.0)
TERMS = JobTerms(10)


class Stage:
    def __init__(self, *, profiles: bool = False) -> None:
        self.registry = JobRegistry(profiles=profiles)

    def tell(self, event: on.JobEvent) -> list[do.JobCommand | on.JobEnded]:
        """What is for others than the driver book."""
        commands = list(self.registry.handle(event))
        self.registry.check_integrity()
        return [c for c in commands if not isinstance(c, DriverDue | DriverUndue)]

    def reached(self) -> JobStage:
        entry = self.registry.find(JOB)
        assert entry is not None
        return entry.stage


def test_a_job_is_submitted_placed_running_and_finished() -> None:
    stage = Stage()
    assert stage.tell(on.JobSubmitted(0.0, JOB, TENANT)) == [do.PlaceJob(JOB, None, 0, 0)]
    stage.tell(on.JobAnswered(0.0, JOB, "placed", "there is room"))
    stage.tell(TurnOpened(1.0, JOB, "m"))
    assert stage.reached() is JobStage.RUNNING
    stage.tell(on.JobEnded(2.0, JOB, "finished"))
    assert stage.reached() is JobStage.FINISHED


def test_a_job_without_a_profile_is_profiled_alone_before_it_is_placed() -> None:
    stage = Stage(profiles=True)
    assert stage.tell(on.JobSubmitted(0.0, JOB, TENANT, None, TERMS)) == [do.ProfileJob(JOB, TERMS)]
    assert stage.reached() is JobStage.PROFILING
    assert stage.tell(on.JobProfiled(9.0, JOB, PROFILE)) == [do.PlaceJob(JOB, PROFILE, 0, 0, TERMS)]


def test_a_held_job_is_told_why_and_placed_later() -> None:
    stage = Stage()
    stage.tell(on.JobSubmitted(0.0, JOB, TENANT, PROFILE))
    stage.tell(on.JobAnswered(0.0, JOB, "held", "no room on 3 nodes"))
    entry = stage.registry.find(JOB)
    assert entry is not None and (entry.stage, entry.reason) == ("held", "no room on 3 nodes")
    stage.tell(on.JobAnswered(9.0, JOB, "placed", "a job left"))
    assert stage.reached() is JobStage.PLACED


def test_a_crash_makes_it_a_new_arrival_at_its_last_complete_iteration() -> None:
    stage = Stage()
    stage.tell(on.JobSubmitted(0.0, JOB, TENANT, PROFILE))
    stage.tell(on.JobAnswered(0.0, JOB, "placed"))
    for _ in range(3):
        stage.tell(on.IterationDone(1.0, JOB))
    again = stage.tell(on.JobCrashed(2.0, JOB, "train-0 is lost"))
    assert again == [do.PlaceJob(JOB, PROFILE, 3, 1)]


def test_late_messages_of_a_job_that_is_over_change_only_its_account() -> None:
    stage = Stage()
    stage.tell(on.JobSubmitted(0.0, JOB, TENANT))
    stage.tell(on.JobEnded(1.0, JOB, "stopped"))
    assert stage.tell(on.JobCrashed(2.0, JOB, "late")) == []
    stage.tell(on.JobAnswered(2.0, JOB, "placed"))
    stage.tell(TurnClosed(2.0, JOB, "m", 3, 4, 0.5, 0.1))
    entry = stage.registry.find(JOB)
    assert entry is not None
    assert (entry.stage, entry.account.tokens, entry.account.engine_s) == ("stopped", 4, 0.5)


def test_a_job_that_comes_again_goes_on_with_its_account() -> None:
    stage = Stage()
    stage.tell(on.JobSubmitted(0.0, JOB, TENANT))
    stage.tell(TurnClosed(1.0, JOB, "m", 3, 4, 0.5, 0.1))
    stage.tell(on.JobTrained(1.0, JOB, 2.0, 0.25))
    stage.tell(on.JobEnded(2.0, JOB, "finished"))
    assert len(stage.tell(on.JobSubmitted(3.0, JOB, TENANT))) == 1
    entry = stage.registry.find(JOB)
    assert entry is not None
    assert (entry.account.tokens, entry.account.device_s) == (4, 2.5)
    assert entry.account.operations_waited_s == 0.25
