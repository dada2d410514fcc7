"""What an intruder tries: each attack returns whether it succeeded, so False is good news."""

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from benchmarks.intruders.target import INTRUDER, VICTIM, Target
from slackwater.model.errors import SlackwaterError
from slackwater.wire import messages
from slackwater.wire.frames import MAGIC, VERSION
from slackwater.wire.sandbox import SandboxFacts
from slackwater.worker.connection import Connection

_FRAME = struct.Struct("<2sBBI")
_GROWTH_BYTES = 128 << 20
Attack = Callable[[Target], bool]


def loader_variables_reach_the_launcher(target: Target) -> bool:
    """The loader of a launcher that takes an action's variables would write where they say."""
    mark = f"loader-{secrets.token_hex(4)}"
    variables = {"LD_DEBUG": "all", "LD_DEBUG_OUTPUT": str(target.state / mark)}
    target.shell("true", variables=variables)
    return any(target.state.glob(f"{mark}*"))


def keys_are_read(target: Target) -> bool:
    """Keys and the fleet's secret, from their files and from processes' memory of them."""
    names = " ".join(str(target.state / name) for name in ("keys.json", "fleet.secret"))
    told = target.shell(f"cat {names} /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'")["stdout"]
    return any(key in told for key in target.keys.values()) or "SLACKWATER_SECRET" in told


def home_is_written(target: Target) -> bool:
    mark = target.state / f"home-{secrets.token_hex(4)}"
    target.shell(f"echo here > {mark}; echo here > $HOME/../{mark.name}")
    return mark.exists()


def nested_user_namespace(target: Target) -> bool:
    return target.shell("unshare --user --map-root-user echo inside")["stdout"] == "inside\n"


def deep_folders_stop_the_worker(target: Target) -> bool:
    before = target.worker()
    nest = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
    if (name := target.open(INTRUDER)) is not None:
        target.run(INTRUDER, "/usr/bin/env", "python3", "-c", nest, environment=name)
        target.call(INTRUDER, "DELETE", f"environments/{name}")
    return not target.serves() or target.worker() != before


def names_with_nul_stop_the_worker(target: Target) -> bool:
    before = target.worker()
    target.open(INTRUDER, files={"a\0b": ""})
    target.shell("true", variables={"A\0B": "x"})
    target.run(INTRUDER, "/bin/echo", "a\0b")
    return not target.serves() or target.worker() != before


def sparse_snapshot_stops_the_worker(target: Target) -> bool:
    before = target.worker()
    if (name := target.open(INTRUDER)) is not None:
        target.run(INTRUDER, "/usr/bin/truncate", "-s", "8G", "large", environment=name)
        with contextlib.suppress(OSError):
            target.call(INTRUDER, "POST", f"environments/{name}/snapshot", snapshot="large")
        target.call(INTRUDER, "DELETE", f"environments/{name}")
    return not target.serves() or target.worker() != before


def anothers_snapshot_is_read(target: Target) -> bool:
    """`team` names the snapshot `x` of `team.ml` by the dot in its owner's name."""
    own = target.open(VICTIM, files={"secret": "of team.ml"})
    assert own is not None
    target.call(VICTIM, "POST", f"environments/{own}/snapshot", snapshot="x")
    target.call(VICTIM, "DELETE", f"environments/{own}")
    for name in ("ml.x", "team.ml.x", "x@team.ml", "x"):
        stolen = target.open(INTRUDER, snapshot=name)
        if stolen is not None:
            told = target.run(INTRUDER, "/bin/cat", "secret", environment=stolen)["stdout"]
            target.call(INTRUDER, "DELETE", f"environments/{stolen}")
            if told == "of team.ml":
                return True
    return False


def memory_without_a_limit(target: Target) -> bool:
    """Neither an action nor an environment gets by with no memory declared."""
    hog = "x = bytearray(1 << 30); print(len(x))"
    name = target.open(INTRUDER, memory_mib=0)
    given = {} if name is None else {"environment": name}
    for limits in ({"memory_mib": 0}, {"memory_mib": 1}):
        ran = target.run(INTRUDER, "/usr/bin/env", "python3", "-c", hog, limits=limits, **given)
        if ran["stdout"].strip() == str(1 << 30):
            return True
    return False


def network_reaches_the_host(target: Target) -> bool:
    """`network` must not be the host's: the control plane itself listens there."""
    port = target.url.rpartition(":")[2]
    dial = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5); print('in')"
    for limits in ({"network": True}, {"network": False}):
        ran = target.run(INTRUDER, "/usr/bin/env", "python3", "-c", dial, limits=limits)
        if ran["stdout"] == "in\n":
            return True
    return False


def deleted_file_evades_the_quota(target: Target) -> bool:
    """Files that are deleted and open take disk all the same; each is below the limit of one."""
    files = "".join(f"exec {n}> f; rm f; head -c 12000000 /dev/zero >&{n}; " for n in range(3, 9))
    script = f"{files} for i in $(seq 40); do sleep 0.5; done; echo kept"
    return target.shell(script, limits={"disk_mib": 16})["stdout"] == "kept\n"


def process_survives_its_environment(target: Target) -> bool:
    mark = f"7{secrets.randbelow(10**7):07d}"
    hidden = f"env -i SLACKWATER_ENVIRONMENT=x setsid sleep {mark}"
    target.shell(f"({hidden} >/dev/null 2>&1 </dev/null &); sleep 0.2")
    deadline_s = time.monotonic() + 10.0
    while left := _running(mark):
        if time.monotonic() > deadline_s:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, 9)
            return True
        time.sleep(0.05)
    return False


def _running(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"sleep\0{mark}" in (entry / "cmdline").read_text():
                found.append(int(entry.name))
    return found


def metrics_name_tenants(target: Target) -> bool:
    """To nobody, and to a tenant no other."""
    target.serves()
    plain = target.http.get("/metrics").text
    own = target.http.get("/metrics", headers={"x-api-key": target.keys[INTRUDER]}).text
    return "tenant=" in plain or f'tenant="{VICTIM}"' in own


def foreign_host_is_served(target: Target) -> bool:
    """A page of another site must not reach the service under its own name."""
    headers = {"host": "evil.example", "x-api-key": target.keys[INTRUDER]}
    named = target.http.get("/slackwater/environments", headers=headers)
    headers = {"origin": "http://evil.example", "x-api-key": target.keys[INTRUDER]}
    crossed = target.http.post("/slackwater/environments", headers=headers, json={})
    return named.status_code == 200 or crossed.status_code < 400


def half_a_character_loses_others_requests(target: Target) -> bool:
    """A string that cannot be written must not take others' along on the way to the plane."""
    host, _, port = target.url.partition("://")[2].rpartition(":")
    body = b'{"request_id": "\xed\xa0\x80"}'
    head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: {host}\r\nx-api-key: "
    head += f"{target.keys[INTRUDER]}\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    headers = {"x-api-key": target.keys[VICTIM]}
    for _ in range(20):
        with contextlib.ExitStack() as opened:
            for _ in range(8):
                peer = socket.create_connection((host, int(port)), 10)
                opened.enter_context(peer).sendall(head.encode() + body)
            try:
                target.http.post(
                    "/api/v1/retrieve_future", headers=headers, json={"request_id": "mine"}
                )
            except httpx.TimeoutException:
                return True
    return False


def keys_are_in_command_lines(target: Target) -> bool:
    hidden = [*target.keys.values(), (target.state / "fleet.secret").read_text().strip()]
    lines = [word for line in target.processes().values() for word in line]
    return any(key in word for key in hidden for word in lines)


def worker_is_impersonated(target: Target) -> bool:
    """Whoever holds the credentials of one worker claims to be a sandbox with 64 cores."""
    hub = target.hub()
    assert hub is not None
    facts = SandboxFacts("evil", [list(range(64))], 1 << 20, "bubblewrap", isolates=True)
    keys = {(target.state / "fleet.secret").read_text().strip()}
    told = Path(f"/proc/{target.worker()}/environ").read_bytes().decode(errors="replace")
    keys |= {word.partition("=")[2] for word in told.split("\0") if word.startswith("SLACKWATER")}
    for key in sorted(keys):
        hello = messages.Hello("sandbox-evil", "sandbox", sandbox=facts)
        try:
            with Connection(hub, hello, key, on_orphaned=lambda: None) as connection:
                connection.receive(2.0)
                return True
        except (SlackwaterError, OSError):
            continue
    return False


def strangers_fill_memory(target: Target) -> bool:
    """Three peers that proved nothing announce and send frames of 256 MiB."""
    hub = target.hub()
    assert hub is not None
    plane = target.plane()
    before = _resident_bytes(plane)
    peers = []
    for _ in range(3):
        peer = socket.create_connection(hub, 10)
        peers.append(peer)
        with contextlib.suppress(OSError):
            peer.sendall(_FRAME.pack(MAGIC, VERSION, 1, 256 << 20))
            for _ in range(200):
                peer.sendall(bytes(1 << 20))
    grown = _resident_bytes(plane) - before
    for peer in peers:
        peer.close()
    return grown > _GROWTH_BYTES


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


ATTACKS: tuple[Attack, ...] = (
    loader_variables_reach_the_launcher,
    keys_are_read,
    home_is_written,
    nested_user_namespace,
    deep_folders_stop_the_worker,
    names_with_nul_stop_the_worker,
    sparse_snapshot_stops_the_worker,
    anothers_snapshot_is_read,
    memory_without_a_limit,
    network_reaches_the_host,
    deleted_file_evades_the_quota,
    process_survives_its_environment,
    metrics_name_tenants,
    foreign_host_is_served,
    half_a_character_loses_others_requests,
    keys_are_in_command_lines,
    worker_is_impersonated,
    strangers_fill_memory,
)
