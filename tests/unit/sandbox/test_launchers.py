"""Launchers run outside a sandbox, so nothing that an action brings along may reach them."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox_stage import Stage, a_stage, as_non_root, bubblewrap_missing

from harness.sleep_markers import sleep_marker

SECRET = "the operator's key"
LIBRARY = """
#include <stdio.h>
__attribute__((constructor)) static void loaded(void) {
    char text[256];
    FILE *secret = fopen("%(secret)s", "r"), *leak = fopen("leak", "a");
    size_t length = secret ? fread(text, 1, sizeof text, secret) : 0;
    if (leak) fprintf(leak, "loaded %%.*s\\n", (int) length, text);
    if (leak) fclose(leak);
    if (secret) fclose(secret);
}
"""


def steal(backend: str, library: Callable[[Path], bytes]) -> str:
    """Preload a library that reads a secret of whoever runs the supervisor; what it wrote into the
    environment.
    """
    with a_stage(backend) as stage:  # type: ignore[arg-type]
        secret = stage.root / "keys.json"
        secret.write_text(SECRET)
        secret.chmod(0o600)
        stage.supervisor.open("e", files={"e.so": library(secret)})
        for name in ("LD_PRELOAD", "LD_AUDIT"):
            ran = stage.run("/bin/true", variables={name: "./e.so", "LD_LIBRARY_PATH": "."})
            assert ran.over.status == 0, ran
        return (stage.root / "environments" / "e" / "view" / "leak").read_text()


def compiled(secret: Path) -> bytes:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None
    folder = secret.parent
    source, made = folder / "e.c", folder / "made.so"
    source.write_text(LIBRARY % {"secret": secret})
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, source], check=True, timeout=120)
    return made.read_bytes()


@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler")
def test_a_library_of_an_action_is_loaded_inside_and_nowhere_else() -> None:
    if (why := bubblewrap_missing()) is not None:
        pytest.skip(f"this machine has no working bubblewrap: {why}")
    leak = as_non_root(lambda: steal("bubblewrap", compiled))
    assert leak.startswith("loaded"), leak
    assert SECRET not in leak


def test_variables_reach_an_action_whole_and_no_command_line(stage: Stage) -> None:
    given = {"SECRET": "two words\nand a line = 'x'", "EMPTY": "", "PATH": "/usr/bin:/bin:/nowhere"}
    script = 'printf "%s|%s|%s|" "$SECRET" "${EMPTY-unset}" "$PATH"; cat /proc/[0-9]*/cmdline'
    ran = stage.sh(script, variables=given)
    assert ran.stdout.startswith("two words\nand a line = 'x'||/usr/bin:/bin:/nowhere|")
    assert "two words" not in ran.stdout[10:]


def test_an_action_has_no_variable_of_the_workers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "WORKERS_SECRET", "s")
    assert "WORKERS_SECRET" not in stage.sh("env").stdout


def _shown_outside() -> str:
    shown, hidden = str(sleep_marker()), f"hidden-{sleep_marker()}"
    with a_stage("bubblewrap") as stage:
        stage.supervisor.open("e")
        action = stage.start("sleep", shown, variables={"SECRET": hidden})
        found = []
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                found.append(line.read_bytes())
            except OSError:
                continue
        stage.supervisor.stop(action, "seen")
        stage.until_over(action)
        assert any(shown.encode() in words for words in found)
        return "shown" if any(hidden.encode() in words for words in found) else "hidden"


def test_variables_do_not_stand_on_a_launchers_command_line() -> None:
    if (why := bubblewrap_missing()) is not None:
        pytest.skip(f"this machine has no working bubblewrap: {why}")
    assert as_non_root(_shown_outside) == "hidden"


@pytest.mark.parametrize("name", ["", "A=B", "A\0B", "\ud800"])
def test_a_variable_that_cannot_be_passed_on_is_refused(stage: Stage, name: str) -> None:
    ran = stage.sh("true", variables={name: "x"})
    assert ran.over.end.value == "not_started"
    assert "variables: " in ran.over.reason
    assert stage.sh("echo fine").stdout == "fine\n"


def test_a_value_or_a_command_that_cannot_be_passed_on_is_refused(stage: Stage) -> None:
    ran = stage.sh("true", variables={"A": "secret\0x"})
    assert "variables: 'A' must" in ran.over.reason
    assert "secret" not in ran.over.reason
    assert "command: " in stage.run("/bin/echo", "a\0b").over.reason
    assert stage.sh("echo fine").stdout == "fine\n"


def test_no_descriptor_of_a_launcher_reaches_an_action(stage: Stage) -> None:
    assert stage.sh("ls /proc/self/fd | wc -l").stdout.split() == ["4"]
