"""How the time of a decision grows with the fleet: 200 engines against 20, 3,000 models against 10.

CPU time of the fleet controller alone, median over events: a turn submitted, a turn ended and a
heartbeat with ten live turns an engine; an operation submitted and done on four trainers, while the
other models are idle. And the control plane's processor time for each request
(`plane_requests.py`), against an older version with `--before SRC`. And, with `--part crowd`, a
large live fleet (`crowd.py`).
"""

from time import process_time

from benchmarks.options import BenchOptions
from benchmarks.rollout.decision import FleetLoad
from benchmarks.service.crowd import crowd_figures
from benchmarks.service.plane_requests import request_figures
from slackwater.control.fleet.controller import FleetController
from slackwater.control.operations.commands import RunOp
from slackwater.control.operations.events import OpSubmitted, TicketDone, TrainerJoined
from slackwater.model.ids import ModelId, RequestId, WorkerId
from slackwater.model.operation import Operation, OpKind

ENGINES = (20, 200)
MODELS = (10, 3_000)
TRAINERS = 4
PARTS = ("decisions", "requests", "crowd")


def run(options: BenchOptions) -> dict[str, float]:
    """Medians in microseconds of CPU time, and their growth."""
    figures = _decision_figures(options) if options.wants("decisions") else {}
    figures |= request_figures(options) if options.wants("requests") else {}
    if options.part == "crowd":  # by name only: it takes a quarter of an hour
        figures |= crowd_figures(options)
    return figures


def _decision_figures(options: BenchOptions) -> dict[str, float]:
    events = 200 if options.quick else 2_000
    figures: dict[str, float] = {}
    for engines in ENGINES:
        options.progress(f"{engines} engines", 0.0)
        load = FleetLoad(options.seed, instances=engines, live_turns=10 * engines)
        both = [(load.submit().cpu_s, load.end_one().cpu_s) for _ in range(events)]
        beats = [took.cpu_s for _ in range(max(events // engines, 3)) for took in load.beat()]
        figures[f"submit_us_{engines}_engines"] = _median_us([submit_s for submit_s, _ in both])
        figures[f"end_us_{engines}_engines"] = _median_us([end_s for _, end_s in both])
        figures[f"heartbeat_us_{engines}_engines"] = _median_us(beats)
    for models in MODELS:
        options.progress(f"{models} models", 0.5)
        figures[f"operation_us_{models}_models"] = _median_us(_operations(models, events))
    few, many = ENGINES
    for what in ("submit", "end", "heartbeat"):
        grown = figures[f"{what}_us_{many}_engines"] / figures[f"{what}_us_{few}_engines"]
        figures[f"decision_{what}_engines_ratio"] = grown
    few, many = MODELS
    grown = figures[f"operation_us_{many}_models"] / figures[f"operation_us_{few}_models"]
    return figures | {"decision_models_ratio": grown}


def _median_us(seconds: list[float]) -> float:
    return 1e6 * sorted(seconds)[len(seconds) // 2]


def _operations(models: int, events: int) -> list[float]:
    """The CPU time of each operation from its submission to its end, one model after another."""
    controller = FleetController()
    for number in range(TRAINERS):
        controller.handle(TrainerJoined(0.0, WorkerId(f"trainer-{number}")))
    for number in range(models):
        _once(controller, number, 0, OpKind.CREATE)
    took_s: list[float] = []
    for number in range(events):
        seq, model = divmod(number, models)
        took_s.append(_once(controller, model, 1 + seq, OpKind.FORWARD))
    controller.operations.check_integrity()
    return took_s


def _once(controller: FleetController, number: int, seq: int, kind: OpKind) -> float:
    name = f"model-{number}"
    operation = Operation(RequestId(f"{name}-{seq}"), ModelId(name), seq, kind)
    began_s = process_time()
    commands = controller.handle(OpSubmitted(1.0, operation))
    spent_s = process_time() - began_s
    (order,) = (command for command in commands if isinstance(command, RunOp))
    began_s = process_time()
    controller.handle(TicketDone(1.0, order.worker, order.ticket, 0.1))
    return spent_s + process_time() - began_s
