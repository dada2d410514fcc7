"""Whether a service could keep its promise alone."""

from slackwater.model.serving import ServingSlo
from slackwater.policy.serving.step_cost import StepCost, StepCostCurve
from slackwater.worker.coserving_worker import find_slo_fault

COST = StepCost(StepCostCurve((1, 512), (0.02, 0.04)), StepCostCurve((1, 64), (0.01, 0.012)))


def test_a_promise_that_one_step_breaks_is_named_with_what_the_step_takes() -> None:
    assert find_slo_fault(COST, ServingSlo(0.5, 0.15), 512) is None
    slow_tokens = find_slo_fault(COST, ServingSlo(0.5, 0.009), 512)
    assert slow_tokens == "slo: tpot 0.009 s is less than one decode step takes here (0.01 s)"
    late_first = find_slo_fault(COST, ServingSlo(0.02, 0.15), 512)
    assert late_first is not None
    assert late_first.startswith("slo: ttft 0.02 s is less than a prompt of 64 tokens takes")
