"""The invariants of models' lines."""

from collections.abc import Container, Mapping

from slackwater.control.operations.model_queue import ModelQueue
from slackwater.model.ids import ModelId, WorkerId


def check_lines(lines: Mapping[ModelId, ModelQueue], trainers: Container[WorkerId]) -> None:
    """Raise AssertionError if a queue is inconsistent, or its state is on a lost trainer."""
    for model, line in lines.items():
        assert line.model == model
        assert all(seq >= line.next_seq for seq in line.waiting), "an operation was passed over"
        assert not set(line.waiting) & set(line.refused)
        assert line.applied <= len(line.log)
        seqs = [entry.operation.seq for entry in line.log]
        assert seqs == sorted(set(seqs)), "the log is out of order"
        assert line.saved_seq is None or all(seq > line.saved_seq for seq in seqs)
        assert line.worker is None or line.worker in trainers, "state on a lost trainer"
        assert line.move is None or line.worker is not None, "a state moves from nowhere"
        assert line.worker is not None or line.applied == 0
        assert line.aside.keys() <= set(seqs), "a publish that no replay would make again"
        if line.next_seq in line.refused:
            raise AssertionError("a refused number blocks the line")
        if line.has_gap() and line.watched_seq != line.next_seq:
            raise AssertionError("nobody watches for a missing number")
