#!/bin/sh
# Installs everything into .venv: PyTorch (its CPU build where there is no GPU), then deltawire itself.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "deltawire needs Python 3.11 or newer; set PYTHON to one" >&2
    exit 2
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=".venv/bin/python -m pip --disable-pip-version-check"

if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    if [ "$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1; then
        $pip install --progress-bar off "torch>=2.9,<3"
    else
        # The CPU build has a separate version label. Try the index that pip is configured with, then
        # PyTorch's index, which uv knows by name. If neither has it, install the general build,
        # which is several times larger.
        echo "no GPU found: installing PyTorch's CPU build"
        $pip install --quiet "torch==2.13.0+cpu" 2>/dev/null || {
            $pip install --quiet "uv>=0.6,<1" &&
                .venv/bin/uv pip install --python .venv/bin/python --torch-backend=cpu \
                    "torch>=2.9,<3"
        } || {
            echo "the CPU build is not available: installing the general one, which is large"
            $pip install --progress-bar off "torch>=2.9,<3"
        }
    fi
fi
$pip install --quiet --editable ".[rl,dev]"
touch .venv/.ready
