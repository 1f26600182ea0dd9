#!/bin/sh
# Builds an environment with an engine for CPUs, separate from .venv because it pins other versions.
#
#   sh scripts/setup-engine.sh vllm|sglang
#
# Prints the path of its Python; exits with 3 if a package cannot be installed. The large part is
# cached outside the checkout under a hash of its contents and shared between checkouts; .venv-ENGINE
# is a thin layer over it that holds deltawire itself, and for SGLang what stands in for its kernels.
set -eu
cd "$(dirname "$0")/.."

engine=$1
list=scripts/$engine-cpu.txt
layer=.venv-$engine
shims=$(find "scripts/$engine-cpu" -type f 2>/dev/null | sort)

python=${PYTHON:-python3}
tag=$("$python" - "$list" <<'P'
import hashlib, pathlib, sys
held = pathlib.Path(sys.argv[1]).read_bytes() + sys.version.encode() + b"torch 2.13.0"
print(hashlib.sha256(held).hexdigest()[:16])
P
)
cache=${DELTAWIRE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/deltawire}
base=$cache/$engine-$tag
mkdir -p "$cache"

install_base() {
    [ -f "$base/.ready" ] && return
    echo "building the environment of $engine in $base (minutes, once)" >&2
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
    $pip install --quiet --no-deps --requirement "$list" >&2 || exit 3
    $pip install --quiet "obstore>=0.9,<1" "pytest>=9,<10" "pytest-timeout>=2.3,<3" >&2 || exit 3
    touch "$base/.ready"
}

install_layer() {
    # Python files are used in place; the layer depends on what is compiled or registered.
    # shellcheck disable=SC2086 # File names without spaces.
    held=$tag$(cat CMakeLists.txt native/*.?pp pyproject.toml $shims | grep -v '^  "' | cksum)
    [ -f "$layer/.ready" ] && [ "$(cat "$layer/.ready")" = "$held" ] && return
    rm -rf "$layer"
    "$python" -m venv "$layer"
    site=$("$layer/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    under=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$under')" >"$site/engine-base.pth"
    "$layer/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --editable . >&2
    for file in $shims; do cp "$file" "$site/"; done
    echo "$held" >"$layer/.ready"
}

# Two builds at once must not write into the same folder.
exec 9>"$cache/$engine-$tag.lock"
if command -v flock >/dev/null; then flock 9; fi
install_base
install_layer
echo "$PWD/$layer/bin/python"
