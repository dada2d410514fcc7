"""What a service measured becomes a scenario; the service here answers over real HTTP."""

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from slackwater.cli.measured_scenario import measure_tables, spot_rates, write_typical
from slackwater.cli.running_service import ServiceClient
from slackwater.model.errors import ConfigError, RefusedError
from slackwater.model.spot_trace import SpotEvent
from slackwater.sim.slacks.scenario import PERIOD_S, read_slack_scenario

FLEET = Path(__file__).parents[3] / "examples" / "five_slacks" / "fleet.toml"
PROFILE = {"rollout_s": 30.0, "train_s": 12.0, "rollout_nodes": 1, "train_nodes": 1, "sync_s": 0.0}


def job(name: str, done: int = 4, profile: dict[str, Any] | None = PROFILE) -> dict[str, Any]:
    return {
        "job": f"default/{name}",
        "iterations": 10,
        "iterations_done": done,
        "slo": 1.7,
        "profile": profile,
    }


class Answers(BaseHTTPRequestHandler):
    """As the service's API does."""

    jobs: Sequence[dict[str, Any]] = ()
    served = "t_s,prompt_tokens,output_tokens\n"
    spot = "t_s,event,instance_id\n0.000,add,a\n3600.000,remove,a\n7200.000,add,b\n"

    def do_GET(self) -> None:
        kind = type(self)
        slo = {"ttft_s": 0.4, "tpot_s": 0.1, "share": 0.99}
        body, status = "", 200
        match self.path:
            case "/slackwater/coschedule":
                body = json.dumps({"jobs": kind.jobs})
            case "/slackwater/status":
                body = json.dumps({"serving": {"slo": slo}})
            case "/slackwater/traces/served":
                body = kind.served
            case "/slackwater/traces/spot":
                body, status = (kind.spot, 200) if kind.spot else ('{"error": "not yours"}', 403)
        self.send_response(status)
        self.send_header("content-type", "application/json" if status != 200 else "text/csv")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Nothing on the screen."""


@pytest.fixture
def answers() -> Iterator[type[Answers]]:
    class Own(Answers):
        url = ""

    with ThreadingHTTPServer(("127.0.0.1", 0), Own) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        Own.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield Own
        server.shutdown()
        thread.join(30)


def scenario_of(answers: Any, folder: Path) -> Any:
    service = ServiceClient(answers.url, "key")
    return read_slack_scenario(FLEET, (), lambda table: measure_tables(service, table, folder))


def test_jobs_requests_and_spot_engines_are_those_that_the_service_saw(
    answers: type[Answers], tmp_path: Path
) -> None:
    answers.jobs = [job("games"), job("new"), job("done", done=10), job("unknown", profile=None)]
    answers.served += "".join(f"{number}.000,{100 + number},9\n" for number in range(5))
    found = scenario_of(answers, tmp_path)
    games, new = found.jobs
    assert (games.name, new.name) == ("games", "new")
    assert (games.rollout_s, games.train_s, games.iterations, games.slo) == (30.0, 12.0, 6, 1.7)
    assert games.trajectories == 40 and games.rollout_nodes == 1  # the file's where nothing is seen
    assert found.serving.slo.ttft_s == 0.4 and found.serving.nodes == 2
    assert [arrival.prompt_tokens for arrival in found.arrivals(0)] == [100, 101, 102, 103, 104]
    assert found.spot.mean_nodes == pytest.approx(0.5)
    assert found.spot.removals_per_h == pytest.approx(1.0)
    assert found.spot.device_price_per_h == 0.7


def test_without_jobs_or_rights_there_is_one_clear_line(
    answers: type[Answers], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--from-service: no job there has a profile"):
        scenario_of(answers, tmp_path)
    answers.jobs, answers.spot = [job("games")], ""
    with pytest.raises(RefusedError, match="not yours"):
        scenario_of(answers, tmp_path)


def test_of_a_week_the_median_ten_minutes_that_had_requests_are_taken(tmp_path: Path) -> None:
    rows = []
    for window, count in ((0, 1), (30, 3), (500, 9)):  # nothing at all between
        rows += [f"{window * PERIOD_S + at:.3f},{count},5" for at in range(count)]
    path = tmp_path / "served.csv"
    path.write_text("\n".join(["t_s,prompt_tokens,output_tokens", *rows]) + "\n")
    write_typical(path)
    assert path.read_text().splitlines()[1:] == ["0.000,3,5", "1.000,3,5", "2.000,3,5"]


def test_rates_of_spot_engines_are_known_only_if_one_was_taken_away() -> None:
    assert spot_rates([]) is None
    stays = [SpotEvent(0.0, "add", "a"), SpotEvent(10.0, "add", "a")]  # the service restarted
    assert spot_rates(stays) is None
    assert spot_rates([*stays, SpotEvent(40.0, "remove", "a")]) == pytest.approx((1.0, 90.0))
