"""A service that gives permits over HTTP, one at a time for each pool, as the real one answers: for
tests of its clients.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class PermitDesk:
    """`held` is who holds which pool; `seen` every request in order. `slow` polls are
    answered 202.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.held: dict[str, tuple[str, int]] = {}
        self.seen: list[tuple[str, str, dict[str, Any]]] = []
        self.numbers = 0
        self.slow = 0
        self.refusal: str | None = None
        desk = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self._serve("POST")

            def do_DELETE(self) -> None:
                self._serve("DELETE")

            def _serve(self, method: str) -> None:
                size = int(self.headers.get("content-length", 0))
                status, answer = desk.answer(method, self.path, json.loads(self.rfile.read(size)))
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                del args

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            self.seen.append((method, path, body))
            self.lock.notify_all()
            parts = path.strip("/").split("/")
            if path == "/slackwater/jobs":
                if self.refusal:
                    return 201, {"admitted": False, "reason": self.refusal}
                return 201, {"admitted": True}
            if len(parts) == 3:
                self._free(parts[2], None)
                return 200, {}
            if path.endswith("/alive"):
                return 200, {}
            if len(parts) == 4:
                return self._ask(parts[2], body)
            if method == "DELETE":
                self._free(parts[2], int(parts[4]))
            return 200, {"state": "held"}

    def _ask(self, job: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.slow:
            self.slow -= 1
            return 202, {"state": "waiting"}
        if not self.lock.wait_for(lambda: body["phase"] not in self.held, 0.2):
            return 202, {"state": "waiting"}
        self.numbers += 1
        self.held[body["phase"]] = (job, self.numbers)
        return 200, {"permit": self.numbers, "phase": body["phase"], "nodes": ["n"], "switch": True}

    def _free(self, job: str, permit: int | None) -> None:
        self.held = {
            pool: held
            for pool, held in self.held.items()
            if held[0] != job or permit not in (None, held[1])
        }
        self.lock.notify_all()

    def wait_for_ask(self) -> None:
        with self.lock:
            assert self.lock.wait_for(
                lambda: any(path.endswith("/permits") for _, path, _ in self.seen), 30.0
            )

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
