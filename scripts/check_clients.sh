#!/usr/bin/env bash
# Runs client libraries that nobody here wrote, unmodified, against a service with a tiny model.
# Usage: scripts/check_clients.sh [VENV]   (made if it is not there: about 4 GB, some minutes)
# The service is that of $SLACKWATER (default: .venv/bin/slackwater, then the one on the path).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$(realpath -m "${1:-"$here/../.venv-clients"}")
service=${SLACKWATER:-"$here/../.venv/bin/slackwater"}
[ -x "$service" ] || service=slackwater
if ! "$venv/bin/python" -c 'import langchain_openai, lm_eval, verifiers' 2>/dev/null; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install -q torch==2.13.0
    "$venv/bin/pip" install -q openai langchain langchain-openai inspect-ai 'lm-eval[api]' 'verifiers==0.1.14' transformers
fi
more="$venv/more" # litellm and others want an older openai than those do
if [ ! -x "$more/bin/guidellm" ]; then
    "${PYTHON:-python3}" -m venv "$more"
    "$more/bin/pip" install -q torch==2.13.0
    "$more/bin/pip" install -q litellm instructor 'pydantic-ai-slim[openai]' dspy mcp guidellm
fi
work=$(mktemp -d)
trap '"$service" down --state "$work/state" >/dev/null 2>&1 || true; rm -rf "$work"' EXIT
model=$("$service" model make tiny --models "$work/models")
"$service" up --background --state "$work/state" --port 0 --sandboxes 1 --model "tiny=$model" >"$work/up"
url=$(awk '$1 == "url" {print $2}' "$work/up")
key=$(awk '$1 == "key" {print $2}' "$work/up")
unset PYTHONPATH
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HOME="$work/hf" OPENAI_API_KEY="$key" TOKENIZERS_PARALLELISM=false LITELLM_LOCAL_MODEL_COST_MAP=True
failed=0
check() {
    if "$@" >"$work/log" 2>&1; then
        tail -1 "$work/log"
    else
        echo "FAILED: $*"
        tail -30 "$work/log"
        failed=1
    fi
}
lm_eval() { # the model kind, its path under /v1, a task, further options
    (cd "$here/clients/lm_eval_tasks" && "$venv/bin/lm_eval" run --model "$1" --include_path . --tasks "$3" \
        --model_args "model=tiny,base_url=$url/v1/$2,tokenizer_backend=huggingface,tokenizer=$model,num_concurrent=2,max_retries=1" \
        --batch_size 1 "${@:4}") && echo "lm-eval: $1 $3"
}
cd "$here/clients"
check "$venv/bin/python" langchain_agent.py "$url" "$key" tiny
check "$venv/bin/python" inspect_task.py "$url" "$key" tiny
check "$venv/bin/python" verifiers_env.py "$url" "$key" tiny
check "$more/bin/python" litellm_calls.py "$url" "$key" tiny
check "$more/bin/python" instructor_model.py "$url" "$key" tiny
check "$more/bin/python" pydantic_ai_agent.py "$url" "$key" tiny
check "$more/bin/python" dspy_program.py "$url" "$key" tiny
guidellm() { # twelve requests, four at a time
    "$more/bin/guidellm" run --backend "kind=openai_http,target=$url,api_key=$key,model=tiny" \
        --profile kind=concurrent,streams=4 --constraint kind=max_requests,count=12 \
        --tokenizer "kind=huggingface_auto,model=$model" --output "kind=json,path=$work/load.json" \
        --data kind=synthetic_text,prompt_tokens=16,output_tokens=8 --disable-progress &&
        "$more/bin/python" guidellm_report.py "$work/load.json"
}
check guidellm
check "$more/bin/python" mcp_tools.py "$service" "$work/state"
check lm_eval local-completions completions tides_choice
check lm_eval local-completions completions tides_said
check lm_eval local-chat-completions chat/completions tides_said --apply_chat_template
exit $failed
