"""One job as a person writes it: a `[[jobs]]` table of a scenario, or a row of `jobs.csv`."""

from dataclasses import dataclass
from pathlib import Path

from slackwater.model.device import layout_devices
from slackwater.model.errors import ConfigError
from slackwater.model.host_state import rollout_state_gb, train_state_gb
from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec, SloScope
from slackwater.sim.inputs.csv_rows import read_rows


@dataclass(frozen=True, slots=True)
class JobTable:
    """Worst-case phase lengths and the slowdown that is tolerated; state sizes follow the model's
    size unless given. A job with layouts, such as tp=2,dp=4, has as many devices as those have
    ranks, and no more nodes than hold them.
    """

    job: str
    rollout_s: float
    train_s: float
    slo: float
    iterations: int = 100
    arrival_s: float = 0.0
    sync_s: float = 0.0
    rollout_nodes: int = 1
    train_nodes: int = 1
    model_billions: float = 7.0
    rollout_state_gb: float | None = None
    train_state_gb: float | None = None
    slo_scope: SloScope = "job"
    rollout_layout: str = ""
    train_layout: str = ""

    def __post_init__(self) -> None:
        if not self.job.strip():
            raise ConfigError.of("job", self.job, "must be a name")
        self.spec()  # what the job's own types refuse is refused here, where the line is known

    def spec(self) -> JobSpec:
        """The job as the co-scheduler sees it."""
        billions = self.model_billions
        rollout_gb, train_gb = self.rollout_state_gb, self.train_state_gb
        profile = JobProfile(
            rollout_s=self.rollout_s,
            train_s=self.train_s,
            sync_s=self.sync_s,
            rollout_nodes=self.rollout_nodes,
            train_nodes=self.train_nodes,
            rollout_state_gb=rollout_state_gb(billions) if rollout_gb is None else rollout_gb,
            train_state_gb=train_state_gb(billions) if train_gb is None else train_gb,
            model_billions=billions,
            rollout_devices=layout_devices(self.rollout_layout, "rollout_layout"),
            train_devices=layout_devices(self.train_layout, "train_layout"),
        )
        return JobSpec(
            job=JobId(self.job),
            arrival_s=self.arrival_s,
            iterations=self.iterations,
            slo=self.slo,
            profile=profile,
            slo_scope=self.slo_scope,
        )


def read_jobs(path: Path) -> tuple[JobSpec, ...]:
    """Jobs of a CSV file, each id used once."""
    jobs: dict[JobId, JobSpec] = {}
    for entry in read_rows(path, JobTable):
        spec = entry.spec()
        if spec.job in jobs:
            raise ConfigError.of(f"{path.name}: job", entry.job, "is used twice; give each its own")
        jobs[spec.job] = spec
    if not jobs:
        raise ConfigError.of("--jobs", str(path), "must hold at least one job")
    return tuple(jobs.values())
