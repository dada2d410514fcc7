#!/usr/bin/env bash
# The wheel alone: built, installed into an environment of its own, and used from an empty folder.
#
#     scripts/check_wheel.sh [PYTHON]     # builds with PYTHON, which needs pip (default: python3)
#
# Dependencies come from the package index, at the versions of constraints.txt. Where the variable
# DEPENDENCIES names site-packages folders (with colons between), they are taken from there instead,
# and no index is asked.
set -euo pipefail
python=${1:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
bin="$work/venv/bin"
served=""
finish() {
    test -z "$served" || kill "$served" 2>/dev/null || true
    "$bin/slackwater" down --state "$work/state" >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap finish EXIT

echo "== the wheel"
mkdir "$work/dist" "$work/empty"
git -C "$root" ls-files -z src pyproject.toml README.md LICENSE |
    tar -C "$root" --null -T - -cf - | tar -C "$work" --one-top-level=source -xf -
if test -n "${DEPENDENCIES:-}"; then
    "$python" -m pip wheel -q --no-deps --no-index --no-build-isolation -w "$work/dist" "$work/source"
    "$python" -m venv --without-pip "$work/venv"
    tr : '\n' <<<"$DEPENDENCIES" > "$("$bin/python" -c 'import site; print(site.getsitepackages()[0])')/dependencies.pth"
    "$python" -m pip --python "$bin/python" install -q --no-deps --no-index "$work"/dist/*.whl
else
    "$python" -m pip wheel -q --no-deps -w "$work/dist" "$work/source"
    "$python" -m venv "$work/venv"
    "$bin/python" -m pip install -q -c "$root/constraints.txt" "$(echo "$work"/dist/*.whl)[serve,rl]"
fi

cd "$work/empty"
export PATH="$bin:$PATH"
"$bin/python" - "$work/venv" <<'PYTHON'
import sys, slackwater
assert slackwater.__file__.startswith(sys.argv[1]), f"{slackwater.__file__} is not the wheel's"
PYTHON
echo "== $(slackwater --version)"
# Compiling would take longer than all the rest; engines cannot do without.
interpreted=${DEPENDENCIES:+env NUMBA_DISABLE_JIT=1}
$interpreted slackwater plan --fleet "$root/examples/plan/fleet.toml" --jobs "$root/examples/plan/jobs.csv" --policy group | tail -3
$interpreted slackwater sim run temporal_mux --policy group --trace trace.json > /dev/null

echo "== up, train, status"
slackwater up --background --state "$work/state" --port 0
slackwater train copy-digits --state "$work/state" --run "$work/run" \
    --set warm_up.steps=1 --set grpo.steps=1 --set grpo.groups=4
slackwater status --state "$work/state"

echo "== the dashboard, live and recorded"
coproc RECORDED { exec slackwater dashboard trace.json --print; }
served=$RECORDED_PID
read -r recorded <&"${RECORDED[0]}"
"$bin/python" - "$work/state/server.json" "$recorded" <<'PYTHON'
import json, re, sys
import httpx

server = json.load(open(sys.argv[1]))
url, _, key = sys.argv[2].partition("/dashboard#key=")
for url, key in ((server["url"], server["key"]), (url, key)):
    with httpx.Client(base_url=url, timeout=30) as browser:
        page = browser.get("/dashboard").raise_for_status().text
        for path in re.findall(r'(?:src|href)="([^"]+)"', page):
            browser.get(path).raise_for_status()
        browser.post("/dashboard/api/login", json={"key": key}).raise_for_status()
        found = browser.get("/dashboard/api/timeline?start=0&end=100").raise_for_status().json()
        print(f"{url}/dashboard: {len(found['lanes'])} lanes")
PYTHON
slackwater down --state "$work/state"
echo "the wheel works"
