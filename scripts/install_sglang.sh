#!/usr/bin/env bash
# SGLang 0.5.23 on a CPU in .venvs/sglang, about 3.2 GB. Used by tests/engines. See scripts/lib/venvs.sh.
#
# SGLang publishes no CPU wheel of its kernels. Its scheduler, model and speculation code run all the same: without its
# declared dependencies (CUDA only), with torch_native attention for the target and interpreted Triton for the drafter, with
# scripts/sglang_cpu on PYTHONPATH in place of two packages that are imported but never called, and with two changes in
# this throw-away copy (scripts/sglang_cpu/patch.py says which and why).
set -uo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/lib/venvs.sh
source scripts/lib/venvs.sh

need_linux_x86_64 sglang || exit 3
stamp=$(venv_stamp sglang scripts/install_sglang.sh constraints/sglang.txt)
if [ -f "$stamp" ]; then  # the changes may be newer than the installation
    "$VENVS/sglang/bin/python" scripts/sglang_cpu/patch.py
    exit
fi
echo "install: sglang 0.5.23 into $VENVS/sglang"
venv_create sglang && venv_torch sglang &&
    venv_pip sglang -c constraints/sglang.txt --no-deps sglang==0.5.23 &&
    venv_pip sglang -c constraints/sglang.txt transformers==5.19.0 triton numpy scipy pillow pydantic packaging tqdm \
        orjson psutil pybase64 requests starlette msgspec pyzmq ipython aiohttp uvloop dill apache-tvm-ffi sentencepiece \
        compressed-tensors gguf openai partial-json-parser uvicorn fastapi setproctitle einops xgrammar \
        jsonschema soundfile python-multipart || exit 3  # the last three: imported by its HTTP server
"$VENVS/sglang/bin/python" scripts/sglang_cpu/patch.py || exit 1
PYTHONPATH=scripts/sglang_cpu venv_done sglang "$stamp" \
    'import torch, sglang; print("sglang", sglang.__version__, "torch", torch.__version__)'
