"""The invariants of a node's residency controller, for storms and tests."""

from slackwater.control.state.record import ResidencyRecords
from slackwater.control.state.residency_controller import ResidencyController
from slackwater.model.residency import Tier


def check_residency(controller: ResidencyController) -> None:
    """Raise AssertionError if a budget is exceeded, or a state is not where it should be."""
    records, waits, budgets = controller._records, controller._waits, controller.budgets
    for device in {record.device for record in records.values()}:
        assert controller.bytes_in_use(Tier.DEVICE, device) <= budgets.device_bytes
    assert controller.bytes_in_use(Tier.HOST) <= budgets.host_bytes
    assert controller.bytes_in_use(Tier.DISK) <= budgets.disk_bytes
    assert len({wait.ticket for wait in waits}) == len(waits)
    for wait in waits:
        assert wait.deployment in records
    for record in records.values():
        assert record.leases >= 0 and record.readers >= 0
        assert not record.leases or (record.tier is Tier.DEVICE and record.moving_to is None)
        assert record.moving_to is None or abs(record.moving_to - record.tier) == 1
        coming = record.tier is Tier.DISK and record.moving_to is Tier.HOST
        assert not record.following or (coming and not record.blank)
        if record.doomed:
            continue
        if record.tier is Tier.HOST and record.moving_to is not Tier.DISK:
            assert record.on_host or record.blank
        if record.tier is Tier.DISK and not record.blank:
            assert record.on_disk
    _check_lending(records)


def _check_lending(records: ResidencyRecords) -> None:
    """Lenders have what their borrowers rely on."""
    for record in records.values():
        lenders = list(records.lenders(record))
        if record.loading:
            assert all(r.readable for r in lenders)
        if not record.doomed and record.tier is Tier.DEVICE:
            assert not any(r.is_base and r.blank for r in lenders)
        if record.unowned and not record.doomed:
            assert any(records.borrowers(record))
