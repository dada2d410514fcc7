"""A phase on more or fewer nodes than its job asked for takes no longer than placement plans."""

from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.placement import Phase
from slackwater.model.switching import SwitchCosts
from slackwater.policy.placement.arrival import make_arriving_job
from slackwater.sim.cluster.job_execution import JobExecution
from slackwater.sim.cluster.lengths import PhaseShares
from slackwater.sim.cluster.scenario import ClusterScenario
from slackwater.sim.cluster.workload import ProductionWorkload


@settings(max_examples=200, deadline=None)
@given(
    lengths_s=st.tuples(st.floats(5.0, 900.0), st.floats(5.0, 900.0)),
    asked=st.integers(1, 2),
    train_nodes=st.integers(1, 4),
    billions=st.sampled_from([3.0, 7.0, 14.0, 32.0]),
)
def test_at_its_worst_a_phase_takes_what_placement_plans_wherever_it_runs(
    lengths_s: tuple[float, float], asked: int, train_nodes: int, billions: float
) -> None:
    # To bring a state in takes as long on any number of nodes: only the work is divided.
    fleet, costs = ClusterScenario(workload=ProductionWorkload()).view(), SwitchCosts()
    profile = JobProfile(
        *lengths_s, rollout_nodes=asked, train_nodes=asked, model_billions=billions
    )
    spec = JobSpec(JobId("a"), 0.0, 1, 1.5, profile)
    body = JobExecution(spec, PhaseShares([1.0], [1.0], [1.0]), fleet, costs)
    told = make_arriving_job(profile, fleet, 1, spec.slo * profile.solo_s)
    train_s = fleet.train_s(profile, train_nodes)
    local_s = fleet.local_rollout_s(profile, train_nodes)
    for local, phase, planned_s, scanned_s in (
        (True, Phase.ROLLOUT, local_s, told.local_work_s / train_nodes + told.switch_s),
        (True, Phase.TRAIN, train_s, told.train_work_s / train_nodes + told.switch_s),
        (False, Phase.ROLLOUT, profile.rollout_s, told.rollout_s),
        (False, Phase.TRAIN, train_s, told.train_work_s / train_nodes + told.switch_s),
    ):
        body.settle(local=local, train_nodes=train_nodes)
        worst_s = body.warm_s + body.work_s[phase][0] * body.scale(phase)
        assert abs(worst_s - planned_s) <= 1e-6 * planned_s
        assert abs(scanned_s - planned_s) <= 1e-6 * planned_s
