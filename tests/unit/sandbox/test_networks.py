"""A granted network leads to the addresses that the operator allows, and nowhere else."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest
from sandbox_stage import Stage, a_stage, as_non_root, bubblewrap_missing

from slackwater.model.endpoint import Endpoint
from slackwater.model.errors import ConfigError
from slackwater.sandbox import egress_proxy, process_tree
from slackwater.sandbox.choice import BackendName

BODY = b"from the server"

# What an action tries: the proxy for plain HTTP and for a tunnel, then ways round it.
ASK = """
import os, socket, sys
port, closed = int(sys.argv[1]), int(sys.argv[2])
def asked(target):
    host, _, at = os.environ["http_proxy"].removeprefix("http://").partition(":")
    ends = socket.create_connection((host, int(at)), 60)
    ends.sendall(f"{target} HTTP/1.1\\r\\n\\r\\n".encode())
    head = b""
    while b"\\r\\n\\r\\n" not in head:
        head += ends.recv(1)
    return ends, head.split()[1].decode()
def body(ends):
    said = b""
    while piece := ends.recv(4096):
        said += piece
    return said.rpartition(b"\\r\\n\\r\\n")[2].decode()
for way in sys.argv[3:]:
    if way == "http":
        ends, status = asked(f"GET http://127.0.0.1:{port}/x?y")
        print(status, body(ends))
    elif way == "tunnel":
        ends, status = asked(f"CONNECT 127.0.0.1:{port}")
        ends.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        print(status, body(ends))
    else:
        for at in (port, closed):
            try:
                socket.create_connection(("127.0.0.1", at), 3)
                print("in", at)
            except OSError:
                pass
        for host, at in (("127.0.0.1", closed), ("localhost", port), ("169.254.169.254", 80),
                         ("0.0.0.0", port), ("127.0.0.2", port), ("127.1", port), ("[::1]", port)):
            print(asked(f"CONNECT {host}:{at}")[1], end=" ")
"""


@contextlib.contextmanager
def a_server() -> Iterator[int]:
    """Answers every request; its port."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = server.accept()
                    with client:
                        client.settimeout(120)
                        client.recv(65536)
                        length = f"Content-Length: {len(BODY)}\r\nConnection: close\r\n\r\n"
                        client.sendall(f"HTTP/1.1 200 OK\r\n{length}".encode() + BODY)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(120)


@contextlib.contextmanager
def an_echo() -> Iterator[int]:
    """Sends the head of one request back; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            with client:
                client.settimeout(120)
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += client.recv(4096)
                client.sendall(head)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(120)


def tried(backend: BackendName, port: int, closed: int, *, pinned: bool = False) -> str:
    with a_stage(backend, pinned, allowed=[f"127.0.0.1:{port}"]) as stage:
        stage.supervisor.open("e")
        words = ("python3", "-c", ASK, str(port), str(closed))
        ran = stage.run(*words, "http", "tunnel", "round", network=True)
        said = ran.stdout.strip() or ran.stderr + ran.over.reason
        proxy = {"http_proxy": "http://127.0.0.1:3128"}
        ran = stage.run(*words, "tunnel", variables=proxy)
        return f"{said} {'' if 'ConnectionRefusedError' in ran.stderr else 'not '}refused"


WANTED = f"200 {BODY.decode()}\n" * 2 + "403 " * 7 + "refused"


@pytest.mark.parametrize(
    ("backend", "pinned"), [("process", False), ("bubblewrap", False), ("bubblewrap", True)]
)
def test_only_allowed_addresses_are_reached(backend: BackendName, pinned: bool) -> None:
    if backend == "bubblewrap" and (why := bubblewrap_missing()) is not None:
        pytest.skip(f"this machine has no working bubblewrap: {why}")
    if backend == "process" and os.getuid() != 0:
        pytest.skip("plain processes without root have the machine's network")
    with a_server() as port, a_server() as closed:
        assert tried(backend, port, closed, pinned=pinned) == WANTED


def test_without_root_only_allowed_addresses_are_reached() -> None:
    if (why := bubblewrap_missing()) is not None:
        pytest.skip(f"this machine has no working bubblewrap: {why}")

    def work() -> str:
        return tried("bubblewrap", port, closed)

    with a_server() as port, a_server() as closed:
        assert as_non_root(work) == WANTED


def test_without_an_allowed_address_no_network_is_granted(stage: Stage) -> None:
    ran = stage.sh("echo ran", network=True)
    assert (ran.stdout, ran.over.end.value) == ("", "not_started")
    if "network" in stage.platform.backend.guarantees:
        assert "limits.network" in ran.over.reason
        assert "--sandbox-allow HOST:PORT" in ran.over.reason


def test_plain_processes_without_root_refuse_what_they_cannot_keep() -> None:
    def allow() -> str:
        refused = pytest.raises(ConfigError, match=r"--sandbox-allow: .*bubblewrap")
        with refused, a_stage("process", allowed=["127.0.0.1:1"]):
            pass
        with a_stage("process") as stage:
            stage.supervisor.open("e")
            return stage.sh("true", network=True).over.reason

    assert "limits.network" in as_non_root(allow)


def test_environments_do_not_share_a_network() -> None:
    if (why := bubblewrap_missing()) is not None:
        pytest.skip(f"this machine has no working bubblewrap: {why}")
    listen = (
        "import socket, time\n"
        "server = socket.create_server(('127.0.0.1', 7051))\n"
        "print('listens', flush=True)\n"
        "time.sleep(7051)\n"
    )
    dial = "import socket; socket.create_connection(('127.0.0.1', 7051), 3)"
    with a_stage("bubblewrap", allowed=["127.0.0.1:1"]) as stage:
        for name in ("a", "b"):
            stage.supervisor.open(name)
        first = stage.start("python3", "-c", listen, environment="a", network=True)
        for _ in range(100):
            if any(getattr(report, "data", b"") for report in stage.supervisor.step(0.2)):
                break
        cores = {max(os.sched_getaffinity(0))}
        ran = stage.run("python3", "-c", dial, environment="b", network=True, cores=cores)
        assert "ConnectionRefusedError" in ran.stderr
        stage.supervisor.stop(first, "seen")
        stage.until_over(first)


def ask_through_proxy(allowed: str, request: bytes) -> bytes:
    """The proxy's answer to a request that may only go to `allowed`."""
    proxy = egress_proxy.EgressProxy([Endpoint.parse("allowed", allowed)])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=proxy.serve, args=(listener,), daemon=True).start()
        with socket.create_connection(listener.getsockname(), 20) as client:
            client.sendall(request)
            answer = b"".join(iter(lambda: client.recv(4096), b""))
        listener.shutdown(socket.SHUT_RDWR)
    return answer


def test_a_forwarded_request_names_the_allowed_host() -> None:
    with an_echo() as port:
        host = f"127.0.0.1:{port}"
        headers = b"hOsT: elsewhere.example\r\nX-Kept: 1\r\nConnection: keep-alive"
        head = f"GET http://{host}/path?query HTTP/1.1\r\n".encode() + headers
        seen = ask_through_proxy(host, head + b"\r\n\r\n")
    assert seen.decode().lower().split("\r\n") == [
        "get /path?query http/1.1",
        f"host: {host}",
        "connection: close",
        "x-kept: 1",
        "",
        "",
    ]


@pytest.mark.parametrize(
    "header",
    [b"X: 1\nHost: elsewhere", b"X: 1\r\n Host: b", b"Host : elsewhere", b"Host", b"\rX: 1"],
)
def test_a_header_that_servers_read_differently_is_refused(header: bytes) -> None:
    request = b"GET http://127.0.0.1:1/ HTTP/1.1\r\n" + header + b"\r\n\r\n"
    assert ask_through_proxy("127.0.0.1:1", request).startswith(b"HTTP/1.1 400 Bad Request")


@pytest.mark.parametrize("method", [b"GET/\nHost:elsewhere", b"GET\rX", b"\nGET"])
def test_a_request_line_of_several_lines_is_refused(method: bytes) -> None:
    request = method + b" http://127.0.0.1:1/ HTTP/1.1\r\nX: 1\r\n\r\n"
    assert ask_through_proxy("127.0.0.1:1", request).startswith(b"HTTP/1.1 400 Bad Request")


def test_a_killed_proxy_comes_back() -> None:
    if (why := bubblewrap_missing()) is not None:
        pytest.skip(f"this machine has no working bubblewrap: {why}")
    with a_server() as port, a_stage("bubblewrap", allowed=[f"127.0.0.1:{port}"]) as stage:
        stage.supervisor.open("e")
        before = set(process_tree.helpers)
        words = ("python3", "-c", ASK, str(port), "1", "tunnel")
        assert stage.run(*words, network=True).stdout == f"200 {BODY.decode()}\n"
        for pid in process_tree.helpers - before:
            pidfd = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
            os.close(pidfd)
        assert stage.run(*words, network=True).stdout == f"200 {BODY.decode()}\n"


@pytest.mark.parametrize(
    ("host", "address", "may"),
    [
        ("pypi.org", "151.101.0.223", True),
        ("mirror.internal", "10.0.0.7", True),
        ("pypi.org", "127.0.0.1", False),
        ("pypi.org", "169.254.169.254", False),
        ("pypi.org", "0.0.0.0", False),
        ("pypi.org", "::1", False),
        ("pypi.org", "::ffff:127.0.0.1", False),
        ("pypi.org", "fe80::1%eth0", False),
        ("127.0.0.1", "127.0.0.1", True),
    ],
)
def test_a_name_does_not_lead_to_this_machine(host: str, address: str, may: bool) -> None:
    assert egress_proxy._is_allowed_address(host, address) is may


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("PyPI.org:443", Endpoint("pypi.org", 443)),
        ("pypi.org.:443", Endpoint("pypi.org", 443)),
        ("[FD00::1]:80", Endpoint("fd00::1", 80)),
    ],
)
def test_endpoints_are_read(text: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse("--sandbox-allow", text) == endpoint


@pytest.mark.parametrize("text", ["", "pypi.org", "pypi.org:0", "a:65536", ":443", "a b:1", "a:1x"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--sandbox-allow: "):
        Endpoint.parse("--sandbox-allow", text)
