"""Operations run in order, survive any loss, and answer what they would have answered
undisturbed.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.control.operations import commands as do
from slackwater.control.operations import events as on
from slackwater.control.operations.controller import OperationsController
from slackwater.control.operations.facts import PublishDetached
from slackwater.control.operations.model_queue import ModelQueue
from slackwater.control.operations.settings import OperationsConfig
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.ids import ModelId, RequestId, TenantId, WorkerId
from slackwater.model.operation import (
    NO_JOB,
    FaultOwner,
    Operation,
    OperationRecord,
    OpKind,
    OpStatus,
)

from .durable_body import Body, Script, expected_results, told

MODEL, TRAINER = ModelId("m"), WorkerId("t")
FB, STEP, SAVE = OpKind.FORWARD_BACKWARD, OpKind.OPTIM_STEP, OpKind.SAVE
PUBLISH = OpKind.PUBLISH


def op(seq: int, kind: OpKind, model: str = "m") -> Operation:
    return Operation(RequestId(f"{model}-{seq}"), ModelId(model), seq, kind)


class Line:
    """A controller with one trainer that does everything at once, unless told to refuse."""

    def __init__(self, config: OperationsConfig | None = None) -> None:
        self.controller = OperationsController(config)
        self.ran: list[str] = []
        self.failed: dict[str, str] = {}
        self.timers: list[SetTimer] = []
        self.refuse: set[int] = set()
        self.feed(on.TrainerJoined(0.0, TRAINER))
        self.submit(0, OpKind.CREATE)

    def submit(self, seq: int, kind: OpKind) -> None:
        self.feed(on.OpSubmitted(0.0, op(seq, kind)))

    def reject(self, seq: int, kind: OpKind) -> None:
        self.feed(on.OpRejected(0.0, op(seq, kind), "wrong dtype"))

    def feed(self, event: on.Event) -> None:
        for command in told(self.controller, event):
            self.controller.check_integrity()
            match command:
                case do.RunOp(worker, ticket, operation):
                    self._run(worker, ticket, operation)
                case do.DiscardGradients(worker, ticket):
                    self.ran.append("drop")
                    self.feed(on.TicketDone(0.0, worker, ticket, 0.0))
                case do.SaveState(worker, ticket, _, seq):
                    self.ran.append(f"snapshot {seq}")
                    self.feed(on.TicketDone(0.0, worker, ticket, 0.0))
                case do.FailOp(request, error):
                    self.failed[request] = error
                case SetTimer():
                    self.timers.append(command)

    def _run(self, worker: WorkerId, ticket: int, operation: Operation) -> None:
        if operation.seq in self.refuse:
            user = FaultOwner.USER
            self.feed(on.TicketFailed(0.0, worker, ticket, "NaN advantage", user, False))
            return
        self.ran.append(f"{operation.kind.value} {operation.seq}")
        self.feed(on.TicketDone(0.0, worker, ticket, 1.0))


def test_chunks_that_arrive_first_chunk_last_run_in_order() -> None:
    line = Line()
    for seq, kind in ((2, FB), (3, FB), (1, FB), (4, STEP)):
        line.submit(seq, kind)
    assert line.ran[1:] == [f"forward_backward {n}" for n in (1, 2, 3)] + ["optim_step 4"]


def test_a_failed_forward_backward_fails_its_optim_step_and_leaves_a_clean_slate() -> None:
    line = Line()
    line.refuse = {2}
    for seq, kind in ((1, FB), (2, FB), (3, STEP), (4, FB), (5, STEP)):
        line.submit(seq, kind)
    assert line.ran[1:] == ["forward_backward 1", "drop", "forward_backward 4", "optim_step 5"]
    assert line.failed["m-2"] == "NaN advantage"
    assert "forward_backward seq 2 failed: NaN advantage" in line.failed["m-3"]
    assert set(line.failed) == {"m-2", "m-3"}


def test_a_rejected_forward_backward_uses_its_number_and_fails_its_optim_step() -> None:
    line = Line()
    line.reject(1, FB)
    line.submit(2, STEP)
    line.submit(3, FB)
    line.submit(4, STEP)
    assert "forward_backward seq 1 was rejected: wrong dtype" in line.failed["m-2"]
    assert line.ran[1:] == ["drop", "forward_backward 3", "optim_step 4"]


def test_a_rejected_save_spoils_nothing() -> None:
    line = Line()
    line.submit(1, FB)
    line.reject(2, SAVE)
    line.submit(3, STEP)
    assert line.ran[1:] == ["forward_backward 1", "optim_step 3"]
    assert not line.failed


def test_a_rejected_optim_step_drops_the_gradients_it_would_have_used() -> None:
    line = Line()
    line.submit(1, FB)
    line.reject(2, STEP)
    line.submit(3, FB)
    assert line.ran[1:] == ["forward_backward 1", "drop", "forward_backward 3"]


def test_a_number_that_never_comes_is_given_up_after_a_while_and_not_before() -> None:
    line = Line(OperationsConfig(give_up_gap_after_s=60.0))
    line.submit(2, FB)
    line.submit(3, STEP)
    assert line.ran == ["create_model 0"]
    assert line.timers[-1].at_s == 60.0
    line.feed(TimerFired(60.0, line.timers[0].name))
    assert line.ran[1:2] == ["forward_backward 2"]
    assert "forward_backward seq 1 never arrived" in line.failed["m-3"]


def test_a_number_that_comes_in_time_stops_the_clock() -> None:
    line = Line()
    line.submit(2, STEP)
    line.submit(1, FB)
    line.feed(TimerFired(60.0, line.timers[0].name))
    assert not line.failed


def test_a_number_lost_behind_one_that_runs_is_given_up_too() -> None:
    """Send 3, then 1, never 2: the clock starts when 1 is over, whatever comes or does not come
    after.
    """
    controller = OperationsController(OperationsConfig(give_up_gap_after_s=60.0))
    told(controller, on.OpSubmitted(0.0, op(0, FB)))
    told(controller, on.OpSubmitted(1.0, op(3, FB)))
    told(controller, on.OpSubmitted(2.0, op(1, FB)))
    (first,) = told(controller, on.TrainerJoined(3.0, TRAINER))
    assert isinstance(first, do.RunOp)
    *_, second = told(controller, on.TicketDone(4.0, TRAINER, first.ticket, 1.0))
    assert isinstance(second, do.RunOp)
    *_, timer = told(controller, on.TicketDone(100.0, TRAINER, second.ticket, 1.0))
    assert isinstance(timer, SetTimer)
    assert timer.at_s == 160.0
    (third,) = told(controller, TimerFired(160.0, timer.name))
    assert isinstance(third, do.RunOp)
    assert third.operation.seq == 3


def test_what_comes_behind_a_missing_number_does_not_put_off_its_clock() -> None:
    controller = OperationsController(OperationsConfig(give_up_gap_after_s=60.0))
    (timer,) = told(controller, on.OpSubmitted(0.0, op(2, FB)))
    assert isinstance(timer, SetTimer)
    assert timer.at_s == 60.0
    assert told(controller, on.OpSubmitted(50.0, op(3, FB))) == []


def test_a_number_far_ahead_is_refused_by_name() -> None:
    controller = OperationsController(OperationsConfig(max_skipped=10))
    told(controller, on.OpSubmitted(0.0, op(0, FB)))
    controller.check_number(MODEL, 10)
    with pytest.raises(
        ConfigError, match=r"seq_id: 2147483647 must be at most 10: the next one is 0"
    ):
        controller.check_number(MODEL, 2**31 - 1)
    told(controller, on.OpSubmitted(0.0, op(2**31 - 1, FB)))
    controller.check_number(MODEL, 2**31 - 1)  # it is there: a retry finds it


@pytest.mark.parametrize("far", [2**31 - 1, 2**62])
def test_a_gap_of_any_length_is_given_up_at_once(far: int) -> None:
    """Counting to 2**62 would not end; so also when the durable log holds such an operation."""
    line = Line()
    line.submit(far, FB)
    line.submit(far + 1, STEP)
    line.feed(TimerFired(60.0, line.timers[0].name))
    assert line.ran[1:2] == [f"forward_backward {far}"]
    assert "forward_backward seq 1 never arrived" in line.failed[f"m-{far + 1}"]

    controller = OperationsController()
    done, waiting = OpStatus.DONE, OpStatus.WAITING
    records = [
        OperationRecord(op(0, OpKind.CREATE), done),
        OperationRecord(op(far, STEP), done),
        OperationRecord(op(far * 2, FB), waiting),
    ]
    (timer,) = told(controller, on.ModelAdopted(0.0, MODEL, None, tuple(records)))
    assert isinstance(timer, SetTimer)
    told(controller, TimerFired(60.0, timer.name))
    controller.check_integrity()


@given(
    st.sets(st.integers(1, 30), min_size=1).flatmap(
        lambda seqs: st.tuples(
            st.just(sorted(seqs)),
            st.lists(st.sampled_from([FB, STEP, SAVE]), min_size=len(seqs), max_size=len(seqs)),
        )
    )
)
def test_a_gap_with_refused_numbers_in_it_is_given_up_as_if_counted(
    found: tuple[list[int], list[OpKind]],
) -> None:
    refused = dict(zip(*found, strict=True))
    line = ModelQueue(MODEL)
    line.waiting[31] = op(31, STEP)
    for seq, kind in refused.items():
        line.refused[seq] = (op(seq, kind), "bad")
    line.give_up_gap()
    spoiled = None
    for seq in range(31):
        kind = refused.get(seq, FB)
        if kind is STEP:
            spoiled = None
        elif kind is FB and spoiled is None:
            spoiled = seq
    assert line.next_seq == 31
    assert not line.refused
    assert (spoiled is None) == (line.poison is None)
    assert spoiled is None or f"seq {spoiled} " in str(line.poison)


def test_a_load_is_over_only_when_the_service_owns_its_state() -> None:
    line = Line()
    line.submit(1, OpKind.LOAD)
    assert line.ran[1:] == ["load_weights 1", "snapshot 1"]


def test_snapshots_come_after_enough_work_and_only_after_an_optim_step() -> None:
    line = Line(OperationsConfig(save_log_after_s=4.0))
    for seq in range(1, 10):
        line.submit(seq, STEP if seq % 3 == 0 else FB)
    assert [entry for entry in line.ran if entry.startswith("snapshot")] == [
        "snapshot 3",
        "snapshot 9",
    ]


def test_a_trainer_goes_on_while_what_it_published_is_written() -> None:
    controller = OperationsController()
    for event in (
        on.TrainerJoined(0.0, TRAINER),
        on.OpSubmitted(0.0, op(0, OpKind.CREATE)),
        on.TicketDone(0.0, TRAINER, 1, 0.1),
    ):
        told(controller, event)
    (publish,) = told(controller, on.OpSubmitted(0.0, op(1, PUBLISH)))
    assert isinstance(publish, do.RunOp)
    assert not told(controller, on.OpSubmitted(0.0, op(2, FB)))
    detached, passing = (
        command.order if isinstance(command, do.StartWork) else command
        for command in controller.handle(on.TicketDetached(0.0, TRAINER, publish.ticket))
    )
    assert detached == PublishDetached(0.0, NO_JOB, op(1, PUBLISH).request)
    assert isinstance(passing, do.RunOp) and passing.operation.seq == 2
    (written,) = told(controller, on.TicketDone(0.0, TRAINER, publish.ticket, 1.0))
    assert written == do.CompleteOp(op(1, PUBLISH).request, publish.ticket)
    controller.check_integrity()


def test_a_version_whose_trainer_dies_while_writing_is_published_again_from_the_same_state() -> (
    None
):
    controller = OperationsController()
    for event in (
        on.TrainerJoined(0.0, TRAINER),
        on.OpSubmitted(0.0, op(0, OpKind.CREATE)),
        on.TicketDone(0.0, TRAINER, 1, 0.1),
        on.OpSubmitted(0.0, op(1, PUBLISH)),
        on.TicketDetached(0.0, TRAINER, 2),
        on.OpSubmitted(0.0, op(2, FB)),
        on.TicketDone(0.0, TRAINER, 3, 0.1),
        on.TrainerLost(0.0, TRAINER, "killed"),
    ):
        told(controller, event)
    ran = []
    commands = list(told(controller, on.TrainerJoined(0.0, WorkerId("t2"))))
    while commands:
        (run,) = [each for each in commands if isinstance(each, do.RunOp)]
        ran.append(run.operation.seq)
        commands = list(told(controller, on.TicketDone(0.0, WorkerId("t2"), run.ticket, 0.1)))
        ended = [each for each in commands if isinstance(each, do.CompleteOp)]
        assert len(ended) == (run.operation.seq == 1)
        commands = [each for each in commands if isinstance(each, do.RunOp)]
        if ran[-1] == 1:
            break  # the rest of the log is replayed when something asks for the state
    assert ran == [0, 1]
    controller.check_integrity()


def test_an_operation_that_keeps_killing_its_trainer_fails_in_the_end() -> None:
    controller = OperationsController(OperationsConfig(max_attempts=3))
    told(controller, on.OpSubmitted(0.0, op(0, OpKind.CREATE)))
    failed: list[do.FailOp] = []
    for life in range(3):
        worker = WorkerId(f"t{life}")
        told(controller, on.TrainerJoined(0.0, worker))
        assert not failed
        commands = told(controller, on.TrainerLost(0.0, worker, "out of memory"))
        failed += [command for command in commands if isinstance(command, do.FailOp)]
        controller.check_integrity()
    assert "lost 3 times" in failed[0].error
    assert failed[0].owner is FaultOwner.SERVER


def test_an_operation_that_kills_its_trainer_lets_what_is_behind_a_rejected_one_run() -> None:
    controller = OperationsController(OperationsConfig(max_attempts=1))
    told(controller, on.TrainerJoined(0.0, TRAINER))
    for kind, seq in ((OpKind.CREATE, 0), (FB, 1), (STEP, 3)):
        told(controller, on.OpSubmitted(0.0, op(seq, kind)))
        if seq == 0:
            told(controller, on.TicketDone(0.0, TRAINER, 1, 0.0))
    told(controller, on.OpRejected(0.0, op(2, FB), "wrong dtype"))
    told(controller, on.TrainerLost(0.0, TRAINER, "out of memory"))
    controller.check_integrity()
    told(controller, on.TrainerJoined(0.0, WorkerId("t1")))
    (create,) = controller.busy_trainers().values()
    commands = told(controller, on.TicketDone(0.0, WorkerId("t1"), create.ticket, 0.0))
    failed = [command.request for command in commands if isinstance(command, do.FailOp)]
    assert failed == [op(3, STEP).request], "its step's gradients are incomplete"


def test_a_late_report_of_a_lost_trainer_is_about_nothing() -> None:
    controller = OperationsController()
    told(controller, on.TrainerJoined(0.0, TRAINER))
    (run,) = told(controller, on.OpSubmitted(0.0, op(0, OpKind.CREATE)))
    assert isinstance(run, do.RunOp)
    told(controller, on.TrainerLost(0.0, TRAINER, "killed"))
    told(controller, on.TrainerJoined(0.0, TRAINER))
    assert told(controller, on.TicketDone(0.0, TRAINER, run.ticket, 1.0)) == []


def test_a_hole_in_what_was_done_before_a_restart_spoils_the_next_step() -> None:
    controller = OperationsController()
    done, waiting = OpStatus.DONE, OpStatus.WAITING
    records = (
        OperationRecord(op(0, OpKind.CREATE), done),
        OperationRecord(op(2, FB), done),
        OperationRecord(op(3, STEP), waiting),
    )
    told(controller, on.ModelAdopted(0.0, MODEL, None, records))
    (replayed,) = told(controller, on.TrainerJoined(0.0, TRAINER))
    for _ in range(2):
        assert isinstance(replayed, do.RunOp)
        assert replayed.replay
        commands = told(controller, on.TicketDone(0.0, TRAINER, replayed.ticket, 1.0))
        replayed = next(c for c in commands if not isinstance(c, do.ForgetStrays))
    assert isinstance(replayed, do.FailOp)
    assert "forward_backward seq 1 never arrived" in replayed.error


def test_a_number_that_comes_after_a_restart_runs_though_a_later_one_was_refused_before() -> None:
    controller = OperationsController()
    records = (
        OperationRecord(op(0, OpKind.CREATE), OpStatus.DONE),
        OperationRecord(op(2, FB), OpStatus.FAILED),
    )
    told(controller, on.ModelAdopted(0.0, MODEL, None, records))
    told(controller, on.OpSubmitted(0.0, op(1, FB)))
    (made,) = told(controller, on.TrainerJoined(0.0, TRAINER))
    assert isinstance(made, do.RunOp)
    ran = told(controller, on.TicketDone(0.0, TRAINER, made.ticket, 1.0))[-1]
    assert isinstance(ran, do.RunOp) and (ran.operation.seq, ran.replay) == (1, False)


def test_a_full_line_is_told_to_try_again() -> None:
    controller = OperationsController(OperationsConfig(max_waiting_per_model=2))
    for seq in (0, 1):
        controller.check_room(MODEL)
        told(controller, on.OpSubmitted(0.0, op(seq, FB)))
    with pytest.raises(UnavailableError, match="2 operations are waiting"):
        controller.check_room(MODEL)


def test_trainers_serve_owners_in_turn_however_many_models_one_has() -> None:
    controller = OperationsController()
    for name in [*(f"loud{number}" for number in range(9)), "quiet"]:
        owner = TenantId(name.rstrip("0123456789"))
        for seq in range(3):
            told(controller, on.OpSubmitted(0.0, op(seq, FB, name), owner))
    (run,) = told(controller, on.TrainerJoined(0.0, TRAINER))
    served = []
    for _ in range(6):
        assert isinstance(run, do.RunOp)
        served.append(run.operation.model)
        run = told(controller, on.TicketDone(0.0, TRAINER, run.ticket, 1.0))[-1]
    assert [name == "quiet" for name in served] == [False, True] * 3


def test_closing_a_model_fails_what_waits_and_frees_the_trainer() -> None:
    controller = OperationsController()
    told(controller, on.TrainerJoined(0.0, TRAINER))
    told(controller, on.OpSubmitted(0.0, op(0, OpKind.CREATE)))
    commands = told(controller, on.ModelClosed(0.0, MODEL, "session ended"))
    assert [type(command) for command in commands] == [do.FailOp, do.DropModel, do.ForgetStrays]


def script_of(chance: random.Random, model: str) -> list[Script]:
    """A client's program: passes, steps, saves and loads, some of them wrong."""
    script = [Script(op(0, OpKind.CREATE, model))]
    kinds = [FB, FB, FB, STEP, STEP, SAVE, PUBLISH, PUBLISH, OpKind.FORWARD, OpKind.LOAD]
    for seq in range(1, chance.randint(5, 25)):
        kind = chance.choice(kinds)
        wrong = chance.random()
        lost = kind is FB and chance.random() < 0.1
        script.append(Script(op(seq, kind, model), wrong < 0.08, 0.08 <= wrong < 0.16, lost))
    return script


def arrivals_of(chance: random.Random, script: list[Script]) -> list[Script]:
    """Runs of passes may come first one last, as the SDK sends chunks."""
    arrivals = list(script)
    for place in range(2, len(arrivals)):
        first, second = arrivals[place - 1], arrivals[place]
        both = first.operation.kind is FB and second.operation.kind is FB
        if both and chance.random() < 0.5:
            arrivals[place - 1], arrivals[place] = second, first
    return arrivals


def choices(body: Body, arriving: list[Script], quiet: bool) -> list[str]:
    found = ["submit"] * 4 if arriving else []
    found += [f"work {worker}" for worker, box in body.inbox.items() if box] * 4
    found += [f"write {worker}" for worker, left in body.writing.items() if left]
    found += ["move"] * (2 * len(body.moves))
    if len(body.trainers) < 2:
        found += ["join_trainer"] * (4 if not body.trainers else 1)
    if not quiet:
        found += [f"lose {worker}" for worker in body.trainers]
        found += ["restart_service"] if body.chance.random() < 0.3 else []
        found += ["gate_anew", "gate_anew"]
    return found


@pytest.mark.parametrize("seed", range(50))
def test_any_kills_at_any_moment_change_no_answer(seed: int) -> None:
    chance = random.Random(seed)
    scripts = {ModelId(name): script_of(chance, name) for name in ("a", "b")}
    config = OperationsConfig(save_log_after_s=6.0, max_attempts=10_000)
    body = Body(chance, config, scripts)
    arriving = [line for script in scripts.values() for line in arrivals_of(chance, script)]
    arriving = [line for line in reversed(arriving) if not line.lost]
    for turn in range(10_000):
        if turn == 151:
            body.gate(None)
        options = choices(body, arriving, quiet=turn > 150)
        if not options and not body.timers:
            break
        if not options:
            options = ["fire_timer"]
        what, _, worker = chance.choice(options).partition(" ")
        match what:
            case "submit":
                body.submit(arriving.pop())
            case "work":
                body.work(WorkerId(worker))
            case "write":
                body.write(WorkerId(worker))
            case "lose":
                body.lose_trainer(WorkerId(worker))
            case _:
                getattr(body, what)()
    expected = {r: v for script in scripts.values() for r, v in expected_results(script).items()}
    answered = {
        request: (expected[request] if value == "saved" else value)
        for request, value in body.results.items()
    }
    assert answered == expected
