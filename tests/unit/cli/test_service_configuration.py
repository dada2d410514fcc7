"""One TOML says what a service is: options on the line win, `--set` wins over both, and nothing
unknown passes.
"""

import copy
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slackwater.cli import up as up_command
from slackwater.cli.up_options import UpOptions, option_settings
from slackwater.control.coschedule.config import ordering_for
from slackwater.model.config import decode, plain
from slackwater.model.errors import ConfigError, RefusedError
from slackwater.model.serving import ServingSlo
from slackwater.policy.placement.catalogue import POLICIES as CATALOGUE
from slackwater.policy.rollout.balancing import EvenSteps
from slackwater.policy.rollout.catalogue import POLICIES, decode_policy
from slackwater.policy.rollout.routing import CacheAffine
from slackwater.policy.serving.modes import MODES, find_mode
from slackwater.runtime.settings import ServiceSettings, ServingSettings

SLO = ServingSlo(0.5, 0.15)
FILE = """
engines = 3
threads = 2
[rollout]
stall_s = 30.0
routing = "affinity"
balancing = { name = "even_steps", tolerance = 0.3 }
[fleet]
launcher = "join"
[[fleet.pools]]
name = "mixed"
"""


def resolved(tmp_path: Path, *options: str, text: str = FILE) -> str:
    file = tmp_path / "service.toml"
    file.write_text(text)
    where = ["--config", str(file), "--state", str(tmp_path / "state"), "--dry-run"]
    result = CliRunner().invoke(up_command.app, [*where, *options], catch_exceptions=False)
    return result.output


def test_options_win_over_the_file_and_set_wins_over_both(tmp_path: Path) -> None:
    said = tomllib.loads(resolved(tmp_path, "--threads", "4", "--set", "kv_mb=99"))
    assert (said["engines"], said["threads"], said["kv_mb"]) == (3, 4, 99)
    assert tomllib.loads(resolved(tmp_path, "--threads", "4", "--set", "threads=5"))["threads"] == 5


def test_what_is_printed_can_be_read_back_and_means_the_same(tmp_path: Path) -> None:
    once = resolved(tmp_path)
    assert resolved(tmp_path, text=once) == once


def test_rollout_policies_are_chosen_by_name_with_their_parameters(tmp_path: Path) -> None:
    settings = decode(ServiceSettings, tomllib.loads(resolved(tmp_path))).rollout_settings
    assert isinstance(settings.routing, CacheAffine)
    assert settings.balancing == EvenSteps(tolerance=0.3)
    assert settings.stall_s == 30.0


def test_former_names_of_policies_work_for_one_release() -> None:
    assert find_mode(ServingSettings("chat", SLO, mode="ours").mode) is MODES["foresight"]
    assert CATALOGUE["ours"] is CATALOGUE["interleaving"]
    assert ordering_for("ours") == ordering_for("interleaving")


def test_an_unknown_serving_mode_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="mode: 'warm' must be one of"):
        ServingSettings("chat", SLO, mode="warm")


def test_a_key_with_its_former_name_is_read_and_its_present_name_wins(tmp_path: Path) -> None:
    text = FILE.replace("stall_s = 30.0", "barren_losses = 3")
    for options, losses in ([], 3), (["--set", "rollout.max_losses_without_progress=5"], 5):
        table = tomllib.loads(resolved(tmp_path, *options, text=text))
        settings = decode(ServiceSettings, table).rollout_settings
        assert settings.max_losses_without_progress == losses


@pytest.mark.parametrize("decision", POLICIES)
def test_every_listed_policy_can_be_made_from_its_name_alone(decision: str) -> None:
    for name in POLICIES[decision]:
        assert decode_policy(decision, name, "at") is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "engins=3"], "engins: unknown key; did you mean engines?"),
        (["--set", "rollout.routing=warm"], "rollout.routing.name: 'warm' must be one of"),
        (["--set", "rollout.stall=1"], "rollout.stall: unknown key; write stall_s, in seconds"),
        (["--set", "rollout.balancing.pace=1"], "rollout.balancing.pace: unknown key"),
        (["--set", "fleet.pools.0.engines=-1"], "fleet.pools[0]: engines: -1 must be from 0 to"),
        (["--set", "tenants=[]"], "tenants: [] must name at least one"),
        (["--set", "fleet.pools=[]"], "fleet.pools: missing; add a pool"),
        (["--host", ""], "--host: '' must be an address"),
        (["--tenant", ""], "--tenant: '' must be 1-64 letters"),
        (["--kv-mb", "99999999999999999999"], "must be at most 1073741824"),
        (["--set", "models.x=3"], "models.x: 3 must be a path"),
        (["--model", ""], "--model: '' must be a directory"),
        (["--model", "x="], "--model: '' must be a directory"),
        (["--gpu-ids", "0"], "--gpu-ids: ['0'] needs --device cuda"),
        (["--set", "engines"], "--set: 'engines' must be written a.b=value"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(
    tmp_path: Path, options: list[str], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(tmp_path, *options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


EVERY_TABLE = """
models = { tiny = "/m" }

[coschedule.limits]
[residency]
device_mb = 1.0
host_mb = 1.0

[fleet.ray]
gpus = 0
[[fleet.pools]]
name = "p"
engines = 1
trainers = 1
[[fleet.nodes]]
name = "n"
pool = "p"

[rewards.services]
judge = "/m"

[[instances]]
name = "i"
"""
WRONG_NUMBERS = [-1, 10**400, float("nan"), float("-inf"), "9" * 5000, True, [], {}]


def numbers(table: object, at: tuple[str, ...] = ()) -> list[str]:
    """The paths of all numbers in a table."""
    if isinstance(table, (dict, list)):
        members = table.items() if isinstance(table, dict) else enumerate(table)
        return [path for key, value in members for path in numbers(value, (*at, str(key)))]
    return [".".join(at)] if type(table) in (int, float) else []


def test_no_number_that_cannot_be_meant_is_accepted() -> None:
    table = {"state": "/s", **tomllib.loads(EVERY_TABLE)}
    settings = decode(ServiceSettings, table)
    whole = plain(settings) | {"rollout": plain(settings.rollout_settings)}
    for policy in POLICIES:
        del whole["rollout"][policy]
    paths = numbers(whole)
    assert len(paths) > 80
    for path in paths:
        for wrong in WRONG_NUMBERS:
            if wrong == 10**400 and isinstance(value_at(whole, path), int):
                continue  # most counts have no upper bound
            changed = value_at(copy.deepcopy(whole), path, wrong)
            with pytest.raises(ConfigError) as error:
                decode(ServiceSettings, changed)
            said = str(error.value)
            assert len(said) < 400 and "\n" not in said, (path, wrong)


def value_at(table: Any, path: str, value: Any = None) -> Any:
    """The value at a path; or, given one, the table with that value there."""
    *keys, last = path.split(".")
    inner = table
    for key in keys:
        inner = inner[int(key) if isinstance(inner, list) else key]
    if value is None:
        return inner[last]
    inner[last] = value
    return table


def test_setting_one_assumed_cost_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    text = "[coschedule.switching]\nwarm_base_s = 1.0\n"
    whole = tomllib.loads(resolved(tmp_path, text="[coschedule]"))
    changed = tomllib.loads(resolved(tmp_path, text=text))
    whole["coschedule"]["switching"]["warm_base_s"] = 1.0
    assert changed["coschedule"] == whole["coschedule"]


def test_eight_gpus_have_a_trainer_and_seven_engines_each_on_its_own(tmp_path: Path) -> None:
    ids = ("--device", "cuda", "--gpu-ids", "0,1,2,3,4,5,6,7")
    said = resolved(tmp_path, *ids, text="")
    lines = [line for line in said.splitlines() if line.startswith("# device")]
    owners = ["trainer-0", *(f"engine-0-{number}" for number in range(7))]
    assert lines == [f"# device local/cuda:{at}   {name}" for at, name in enumerate(owners)]
    assert tomllib.loads(said)["gpu_ids"] == list("01234567")


def test_one_device_is_shared_as_ever(tmp_path: Path) -> None:
    said = resolved(tmp_path, "--engines", "2", text="")
    assert said.endswith("# device local/cpu:0   trainer-0, engine-0-0, engine-0-1\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--devices", "4", "--engines", "4"], "engine-0-3 needs 1 cpu device; of node local"),
        (["--devices", "4", "--trainer-layout", "dp=8"], "trainer-0 needs 8 cpu devices; the most"),
        (["--gpu-ids", "0,0"], "--gpu-ids: '0,0' must be different ids"),
        (["--device", "cuda", "--set", 'gpu_ids=["0", ""]'], "gpu_ids: ['0', ''] must be differ"),
        (["--engine-layout", "xp=2"], "engine_layout: 'xp=2' must be such as tp=2"),
        (["--devices", "0"], "--devices: 0 must be from 1 to 4096"),
    ],
)
def test_deployments_that_do_not_fit_are_refused_before_the_start(
    tmp_path: Path, options: list[str], said: str
) -> None:
    with pytest.raises((ConfigError, RefusedError)) as error:
        resolved(tmp_path, *options, text="")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_what_a_node_gives_to_managed_state_is_said_in_the_file(tmp_path: Path) -> None:
    text = "[residency]\ndevice_mb = 64.0\ndisk_mb = 10.0\n"
    settings = decode(ServiceSettings, tomllib.loads(resolved(tmp_path, text=text)))
    assert settings.residency is not None
    said = settings.residency.environment()
    assert said == {"SLACKWATER_STATE_DEVICE_MB": "64.0", "SLACKWATER_STATE_DISK_MB": "10.0"}
    for line, fix in (
        ("device_mb = 0.0", "above 0"),
        ("device_mb = 1.0\ndisk_mb = -1.0", "negative"),
    ):
        with pytest.raises(ConfigError, match=f"residency: .* must .*{fix}"):
            resolved(tmp_path, text=f"[residency]\n{line}\n")


def test_every_option_of_a_setting_names_a_field_and_has_its_default() -> None:
    of_settings = {field.name: field.default for field in fields(ServiceSettings)}
    of_options = {field.name: field.default for field in fields(UpOptions)}
    settings = option_settings()
    assert len(settings) == 25
    for name, key in settings.items():
        assert key in of_settings, f"--{name} sets {key}, which is no setting"
        assert (of_options[name] or None) == (of_settings[key] or None), name


def test_options_whose_setting_has_another_name_reach_it(tmp_path: Path) -> None:
    options = ("--session-timeout", "9", "--database", "sqlite:///x", "--allowed-host", "a.b")
    said = tomllib.loads(resolved(tmp_path, *options))
    assert said["session_silent_after_s"] == 9.0 and said["database_url"] == "sqlite:///x"
    assert said["allowed_hosts"] == ["a.b"]
