#!/usr/bin/env bash
# Compares `slackwater eval` with lm-eval through transformers on the same model: SmolLM2-135M, or $MODEL.
# Usage: scripts/check_eval.sh [VENV]   (made, or completed with lm-eval and accelerate; that of check_clients.sh will do)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$(realpath -m "${1:-"$here/../.venv-clients"}")
service=${SLACKWATER:-"$here/../.venv/bin/slackwater"}
samples=${SAMPLES:-100}
if ! "$venv/bin/python" -c 'import accelerate, lm_eval' 2>/dev/null; then # lm-eval's transformers backend wants accelerate
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install -q torch==2.13.0
    "$venv/bin/pip" install -q 'lm-eval[api]' transformers accelerate
fi
work=$(mktemp -d)
trap '"$service" down --state "$work/state" >/dev/null 2>&1 || true; rm -rf "$work"' EXIT
model=${MODEL:-$("$service" model get smollm2 --models "$here/../runs/models")}
mkdir "$work/tasks"
cp "$here"/clients/lm_eval_tasks/*.yaml "$work/tasks"
"$venv/bin/python" - "$samples" >"$work/tasks/tides.jsonl" <<'PYTHON'
import json, random, sys
draw = random.Random(0)
for _ in range(int(sys.argv[1])):
    a, b = draw.randint(1, 12), draw.randint(1, 12)
    wrong = [a + b + draw.choice([1, 2, 3]), abs(a - b), a * b + 1]
    choices = [f" {number}" for number in [a + b, *wrong]]
    draw.shuffle(choices)
    answer = choices.index(f" {a + b}")
    print(json.dumps({"question": f"{a} + {b} =", "choices": choices, "answer": answer}))
PYTHON
"$service" up --background --state "$work/state" --port 0 --model "smollm2=$model" >"$work/up"
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HOME="$work/hf" TOKENIZERS_PARALLELISM=false
cd "$work/tasks"
"$service" eval tides_choice,tides_said --state "$work/state" --program "$venv/bin/lm_eval" --include_path . \
    --json >"$work/ours.json"
# On a busy machine several threads wait for each other at every layer.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$venv/bin/lm_eval" run --model hf --model_args "pretrained=$model,dtype=float32" --device cpu --include_path . \
    --tasks tides_choice,tides_said --batch_size 1 --output_path "$work/theirs" >"$work/log" 2>&1 || { tail -30 "$work/log"; exit 1; }
"$venv/bin/python" - "$work" <<'PYTHON'
import json, math, pathlib, sys
work = pathlib.Path(sys.argv[1])
ours = json.loads((work / "ours.json").read_text())["results"]
theirs = json.loads(next((work / "theirs").rglob("results_*.json")).read_text())["results"]
failed = False
for task, metric in (("tides_choice", "acc"), ("tides_said", "exact_match")):
    mine, other = ours[task][metric], theirs[task][f"{metric},none"]
    error = ours[task].get(f"{metric}_stderr,none", ours[task].get(f"{metric}_stderr", 0.0))
    within = math.isclose(mine, other, abs_tol=max(2 * error, 1e-9))
    failed |= not within
    print(f"{task} {metric}: slackwater eval {mine:.3f}, transformers {other:.3f}, stderr {error:.3f}, "
          f"{'equal' if mine == other else 'within' if within else 'DIFFERENT'}")
sys.exit(failed)
PYTHON
