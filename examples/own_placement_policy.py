"""A placement policy of your own, beside those that ship, on a shipped scenario.

python examples/own_placement_policy.py
"""

from dataclasses import replace

from slackwater.model.job import JobSpec
from slackwater.policy.placement.catalogue import POLICIES
from slackwater.policy.placement.grouped import GroupedPlacement
from slackwater.policy.placement.groups import GroupChoice, choose_isolated
from slackwater.sim.cluster.simulate import simulate
from slackwater.sim.inputs.scenario_file import read_scenario


class NeverShare(GroupedPlacement):
    """Every job has nodes of its own: the simplest policy there is. `_choose` sees the job and
    `self.registry`, all groups.
    """

    name = "never_share"

    def _choose(self, job: JobSpec, now_s: float) -> GroupChoice | None:
        return choose_isolated(self.registry, job.profile, "I do not share")


POLICIES["never_share"] = lambda fleet, options, seed: NeverShare(fleet)

written, folder = read_scenario("quickstart", [])
scenario = written.scenario(folder)
for name in ("never_share", "group", "interleaving"):
    report = simulate(replace(scenario, policy=replace(scenario.policy, name=name)))
    print(f"{name:12} {report.cost:8.0f} $   SLO kept by {report.slo_attainment:.0%}")
