"""A service that brokers actions and nothing else, in a process of its own."""

import secrets
import shutil
from pathlib import Path
from typing import Any

from .service_process import ServiceProcess, wait_for


class ActionServiceProcess(ServiceProcess):
    """`slackwater up` with a sandbox and neither engine nor trainer."""

    def __init__(self, state: Path, port: int, backend: str, *options: str) -> None:
        super().__init__(state, state, port)
        self.sandboxes = Path("/var/tmp") / f"slackwater-test-{secrets.token_hex(4)}"
        self._command = ["up", "--state", str(state)]
        self._command += ["--port", str(port), "--engines", "0", "--trainers", "0"]
        self._command += ["--sandboxes", "1", "--sandbox-backend", backend]
        self._command += ["--sandbox-folder", str(self.sandboxes), *options]

    def start(self) -> None:
        super().start()
        wait_for("a sandbox", lambda: self.status()["gauges"]["sandboxes"] > 0)

    def run(self, *command: str, **given: Any) -> dict[str, Any]:
        """One action, to its end."""
        return self.ended(self.submit(*command, **given))

    def submit(self, *command: str, **given: Any) -> str:
        answer = self.post("/slackwater/actions", {"command": list(command), **given})
        assert answer.status_code in (200, 202), answer.text
        return str(answer.json()["action"])

    def ended(self, action: str) -> dict[str, Any]:
        """Its outcome, when it has one."""
        found: dict[str, Any] = {}

        def over() -> bool:
            answer = self.get(f"/slackwater/actions/{action}?wait_s=5")
            assert answer.status_code in (200, 202), answer.text
            found.update(answer.json())
            return answer.status_code == 200

        wait_for(f"the outcome of {action}", over)
        return found

    def open(self, **given: Any) -> str:
        answer = self.post("/slackwater/environments", given)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["environment"])

    def remove(self) -> None:
        """Stop it, and take away what it left on disk."""
        self.stop()
        shutil.rmtree(self.sandboxes, ignore_errors=True)
