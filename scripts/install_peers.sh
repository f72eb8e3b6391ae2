#!/usr/bin/env bash
# The two trainers that tests/parity compares with, each in its own environment: .venvs/specforge, .venvs/speculators.
#
# Their model and loss code needs a fraction of what the packages declare (SpecForge asks for a whole SGLang), so they are
# installed without dependencies, with what the imports need. Versions are pinned here and in constraints/.
set -uo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/lib/venvs.sh
source scripts/lib/venvs.sh

install_specforge() {
    local stamp
    stamp=$(venv_stamp specforge scripts/install_peers.sh constraints/specforge.txt)
    [ -f "$stamp" ] && return 0
    echo "install: specforge 0.2.0 into $VENVS/specforge"
    venv_create specforge && venv_torch specforge &&
        venv_pip specforge -c constraints/specforge.txt --no-deps specforge==0.2.0 &&
        venv_pip specforge -c constraints/specforge.txt \
            transformers==5.8.1 numpy safetensors triton pydantic pyyaml psutil requests tqdm datasets || return 3
    venv_done specforge "$stamp" 'import importlib.metadata as m, specforge.modeling.draft; print("specforge", m.version("specforge"))'
}

install_speculators() {
    local stamp
    stamp=$(venv_stamp speculators scripts/install_peers.sh constraints/speculators.txt)
    [ -f "$stamp" ] && return 0
    echo "install: speculators 0.9.0 into $VENVS/speculators"
    venv_create speculators && venv_torch speculators &&
        venv_pip speculators -c constraints/speculators.txt --no-deps speculators==0.9.0 hs-connectors==0.9.0 &&
        venv_pip speculators -c constraints/speculators.txt transformers==5.19.0 numpy safetensors pydantic \
            pydantic-settings loguru rich typer click tqdm psutil httpx aiohttp protobuf datasets openai || return 3
    venv_done speculators "$stamp" 'import speculators; from importlib.metadata import version; print("speculators", version("speculators"))'
}

code=0
for peer in ${*:-specforge speculators}; do "install_$peer" || code=3; done
exit $code
