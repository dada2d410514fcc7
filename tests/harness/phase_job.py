"""The job of a process that runs phases, for tests that run several after each other."""

from slackwater.phases import job as jobs


def leave_job() -> None:
    """End the job of this process; the next phase joins a new one."""
    job, jobs._current = jobs._current, None
    if job is not None:
        job.end()
