"""How long a worker that died waits before it is started again."""

from slackwater.control.operations.restarts import RestartPolicy


def test_restarts_back_off_and_forgive_a_worker_that_lived() -> None:
    policy = RestartPolicy(first_s=0.1, longest_s=1.0, healthy_after_s=20)
    assert [policy.delay_s(deaths) for deaths in (1, 2, 3, 9)] == [0.1, 0.2, 0.4, 1.0]
    assert policy.deaths_after(5, lived_s=3.0) == 6
    assert policy.deaths_after(5, lived_s=30.0) == 1
