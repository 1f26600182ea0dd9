#!/bin/sh
# Installs everything into .venv: PyTorch (its CPU build where there is no GPU), then deltawire itself.
# Where the lock fits (CPython 3.11 on Linux, x86-64), the packages are those of requirements/, by hash,
# today as in a year. Elsewhere they are the newest that the ranges of pyproject.toml admit.
# RANGES=1 installs the newest in the ranges here too; VENV names another folder than .venv.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv=${VENV:-.venv}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "deltawire needs Python 3.11 or newer; set PYTHON to one" >&2
    exit 2
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check"
release=$(sed -n 's/^torch==\([0-9.]*\) .*/\1/p' requirements/torch.txt)

if [ -n "${RANGES:-}" ]; then
    locked=
    echo "RANGES is set: installing the newest packages in the ranges of pyproject.toml"
elif [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] &&
    "$venv/bin/python" -c 'import sys; sys.exit(sys.implementation.name != "cpython" or
        sys.version_info[:2] != (3, 11))'; then
    locked=1
else
    locked=
    echo "requirements/ locks CPython 3.11 on Linux, x86-64, and this is another platform:" \
        "installing the newest packages in the ranges of pyproject.toml"
fi

# install_locked FILE…: nothing that the files do not name, and no build tools from elsewhere.
install_locked() {
    for file in "$@"; do set -- "$@" --requirement "$file" && shift; done
    $pip install --quiet --no-deps --no-build-isolation --require-hashes "$@"
}

# The CPU build has a separate version label. Try the index that pip is configured with, then PyTorch's
# index, which uv knows by name.
install_torch_for_cpus() {
    echo "no GPU found: installing PyTorch's CPU build"
    $pip install --quiet --no-deps "torch==$release+cpu" 2>/dev/null || {
        $pip install --quiet "uv>=0.6,<1" &&
            "$venv/bin/uv" pip install --no-deps --python "$venv/bin/python" --torch-backend=cpu \
                "torch==$release"
    } || {
        echo "the CPU build is not available: installing the general one, which is large"
        return 1
    }
}

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    cpus=
    if [ "$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then
        if install_torch_for_cpus; then cpus=1; fi
    fi
    if [ -n "$locked" ] && [ -n "$cpus" ]; then
        # All that PyTorch needs besides its CUDA libraries.
        needed=$(mktemp)
        grep -Ev '^(torch|triton|nvidia|cuda)' requirements/torch.txt >"$needed"
        install_locked "$needed"
        rm -f "$needed"
    elif [ -n "$locked" ]; then
        install_locked requirements/torch.txt
    else
        # An installed CPU build satisfies the range: this adds what it needs.
        $pip install --progress-bar off "torch==$release"
    fi
fi
if [ -n "$locked" ]; then
    install_locked requirements/build.txt
    install_locked requirements/core.txt requirements/rl.txt requirements/dev.txt
    $pip install --quiet --no-deps --no-build-isolation --editable .
else
    $pip install --quiet --editable ".[rl,dev]"
fi
[ -x "${CHROMIUM:-/usr/bin/chromium}" ] ||
    echo "Chromium is missing, so the page of deltawire watch is not tested: install Debian's package" \
        "chromium, or set CHROMIUM to one"
touch "$venv/.ready"
