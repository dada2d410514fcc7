"""What the demo's jobs took alone, from the record of its controllers' events and the processor
time that each role used meanwhile.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.slacks.demo_processors import BusyTime, ProcessorLooks
from slackwater.control.record import read_entry

_TIMES = ("step_s", "action_s", "loan_s", "handover_s", "sync_s", "train_s", "save_s", "reply_s")
_TRAINING = ("forward_backward", "optim_step")


@dataclass(frozen=True, slots=True)
class AloneMeasures:
    """Seconds: of a token on an engine, its turn's prefill counting as one (`step_s`); of a core
    for an action; of a pull by the kind of engine; of a loan until its engine joins; from the last
    action to the first training operation (`handover_s`); from the last update to the next turn
    (`sync_s`); of an iteration's updates, and of the checkpoint that is saved while the next one
    rolls out; and from the first group's answers to the first action (`reply_s`). An engine runs
    `turns` at once, actions have `cores`, and `tokens` are those of each turn.

    `processors` says how many processors each running engine, serving engine, trainer and action
    keeps busy. Control plane, drivers and agents are divided among them by what they use. All this
    is of the jobs' second and later iterations, in which the processors had this `speed`. Jobs
    together begin at `together_s` of the monotonic clock.
    """

    step_s: float
    action_s: float
    pull_s: dict[str, float]
    loan_s: float
    handover_s: float
    sync_s: float
    train_s: float
    save_s: float
    reply_s: float
    turns: int
    cores: int
    serving_nodes: int
    processors: dict[str, float]
    tokens: tuple[int, ...]
    speed: float = 1.0
    together_s: float = 0.0

    def scaled(self, by: float) -> "AloneMeasures":
        """What the same would take on processors that are so much slower."""
        times = {name: getattr(self, name) * by for name in _TIMES}
        pull_s = {kind: took_s * by for kind, took_s in self.pull_s.items()}
        return replace(self, **times, pull_s=pull_s)


def measures_of(record: Path, looks: ProcessorLooks) -> AloneMeasures:
    """Of the jobs whose names end in `-alone`; `record` as `slackwater up --record` has it, with
    the same clock as `looks`.
    """
    seen = _Alone()
    lines = [*_lines(record, "fleet"), *_lines(record, "actions")]
    for line in sorted(lines, key=lambda one: float(one["event"]["body"]["now_s"])):
        seen.take(line)
        if seen.over:
            break
    return seen.measures(looks)


def _warm(ended: list[tuple[float, float]], windows: list[tuple[float, float]]) -> list[float]:
    """What took so long and ended in these windows; all of it if nothing did."""
    warm = [took_s for at_s, took_s in ended if any(a <= at_s <= b for a, b in windows)]
    return warm or [took_s for _, took_s in ended]


def _lines(record: Path, controller: str) -> Iterator[dict[str, Any]]:
    with record.with_name(f"{record.name}.{controller}.jsonl").open("rb") as file:
        yield from map(read_entry, file)


class _Alone:
    """Follows the record until a job that is not alone submits a turn. `marks` are the moments of
    the present iteration.
    """

    def __init__(self) -> None:
        self.over, self._now_s = False, 0.0
        self._begun: dict[tuple[str, ...], float] = {}
        self._took: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._kinds: dict[str, str] = {}
        self._jobs: dict[str, str] = {}
        self._requests: dict[str, str] = {}
        self._asked_for: Counter[str] = Counter()
        self._marks: dict[str, float] = {}
        self._tokens: list[int] = []
        self._turns = self._cores = 0
        self._busy = BusyTime()
        self._serving: set[str] = set()
        self._processes: dict[str, tuple[str, str]] = {}  # of turns, actions, tickets that run

    def measures(self, looks: ProcessorLooks) -> AloneMeasures:
        windows = self._busy.windows()
        took = {what: _warm(ended, windows) for what, ended in self._took.items()}
        kinds = ("dedicated", "borrowed")
        return AloneMeasures(
            fmean(took["step"]),
            fmean(took["action"]),
            {kind: fmean(took[f"pull {kind}"]) for kind in kinds},
            median(took["loan"]),
            median(took["handover"]),
            median(took["sync"]),
            fmean(took.get("train", [0.0])),
            fmean(took.get("save", [0.0])),
            median(took["reply"]),
            *(self._turns, self._cores, len(self._serving)),
            self._busy.processors(looks),
            tuple(self._tokens),
            looks.speed(windows),
            self._now_s,
        )

    def take(self, line: dict[str, Any]) -> None:
        """One event, and what was decided on it."""
        body = line["event"]["body"]
        now_s = float(body["now_s"])
        self._now_s = now_s
        self._busy.advance(now_s)
        self._event(line["event"]["type"], body, now_s)
        for command in line["commands"]:
            self._command(command["type"], command["body"], now_s)

    def _event(self, kind: str, body: dict[str, Any], now_s: float) -> None:
        match kind:
            case "TurnSubmitted":
                self._submitted(body["spec"], now_s)
            case "TurnEnded":
                self._ended(int(body["total_tokens"]), now_s, str(body["attempt"]))
            case "InstanceJoined":
                spec = body["spec"]
                self._kinds[spec["instance"]] = spec["kind"]
                self._turns = spec["max_running"]
                self._end("loan", now_s, spec["instance"].partition("~")[0])
            case "InstanceReady":
                name, version = body["instance"], body["version"]
                self._end(f"pull {self._kinds.get(name)}", now_s, name, version)
            case "ServingNodeJoined":
                self._serving.add(body["node"])
            case "WorkerJoined":
                self._cores = sum(map(len, body["capacity"]["cores"]))
            case "ActionFinished":
                self._rest(f"action {body['action']}")
                self._end("action", now_s, body["action"])
                self._marks["acted"] = now_s
            case "OpSubmitted":
                self._asked(body["operation"]["kind"], now_s)
            case "TicketDone":
                self._rest(f"ticket {body['ticket']}")
                self._end("save", now_s, str(body["ticket"]))
                if self._begun.pop(("update", str(body["ticket"])), None):
                    self._marks["updated"] = now_s

    def _submitted(self, spec: dict[str, Any], now_s: float) -> None:
        job = self._jobs[spec["turn"]] = str(spec["job"])
        self.over = not job.endswith(("-alone", "/-"))
        self._asked_for[spec["turn"].partition("/")[0]] += 1
        marks, took = self._marks, self._took
        if not job.endswith("-alone") or "asked" not in marks:
            return
        self._busy.start_iteration(job)
        if "acted" in marks:  # else it was the warm-up
            took["reply"].append((now_s, marks["acting"] - marks["answered"]))
            took["handover"].append((now_s, marks["asked"] - marks["acted"]))
            took["sync"].append((now_s, now_s - marks.get("updated", marks["asked"])))
            if "updated" in marks:
                took["train"].append((now_s, marks["updated"] - marks["asked"]))
        marks.clear()

    def _ended(self, tokens: int, now_s: float, attempt: str) -> None:
        self._rest(f"attempt {attempt}")
        began_s = self._begun.pop(("turn", attempt), None)
        if began_s is None:
            return
        self._tokens.append(tokens)
        self._took["step"].append((now_s, (now_s - began_s) / (tokens + 1)))
        request = self._requests.pop(attempt)
        self._asked_for[request] -= 1
        if not self._asked_for[request]:
            self._marks.setdefault("answered", now_s)

    def _asked(self, kind: str, now_s: float) -> None:
        if kind == "create_model":
            self._marks.clear()  # another job
        elif kind in (*_TRAINING, "save_weights_for_sampler"):
            self._marks.setdefault("asked", now_s)

    def _run(self, kind: str, body: dict[str, Any]) -> None:
        """What begins to run, of which kind and in which process."""
        match kind:
            case "DispatchTurn":  # what is lent is a part of the serving engine's process
                what, name = f"attempt {body['attempt']}", body["instance"].partition("~")[0]
                process = ("serving" if name in self._serving else "engine", name)
            case "StartAction":
                what = f"action {body['spec']['action']}"
                process = ("action", what)
            case "RunOp":
                what, process = f"ticket {body['ticket']}", ("trainer", "")
            case _:
                return
        self._processes[what] = process
        self._busy.begin(*process)

    def _rest(self, what: str) -> None:
        if (process := self._processes.pop(what, None)) is not None:
            self._busy.end(*process)

    def _command(self, kind: str, body: dict[str, Any], now_s: float) -> None:
        self._run(kind, body)
        match kind:
            case "DispatchTurn" if self._jobs.get(body["turn"], "").endswith("-alone"):
                self._begun["turn", str(body["attempt"])] = now_s
                self._requests[str(body["attempt"])] = body["turn"].partition("/")[0]
            case "LendNode":
                self._begun["loan", body["node"]] = now_s
            case "PullVersion" if not body["version"].startswith("base:"):
                name = self._kinds.get(body["instance"])
                self._begun[f"pull {name}", body["instance"], body["version"]] = now_s
            case "StartAction":
                self._begun["action", body["spec"]["action"]] = now_s
                self._marks.setdefault("acting", now_s)
            case "RunOp" if body["operation"]["kind"] in _TRAINING:
                self._begun["update", str(body["ticket"])] = now_s
            case "RunOp" if body["operation"]["kind"] == "save_weights":
                self._begun["save", str(body["ticket"])] = now_s

    def _end(self, what: str, now_s: float, *of: str) -> None:
        began_s = self._begun.pop((what, *of), None)
        if began_s is not None:
            self._took[what].append((now_s, now_s - began_s))
