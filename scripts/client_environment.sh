#!/bin/sh
# Makes .venv-clients, in which clients run that do not fit into .venv: verl, which holds transformers
# below 5.11, Tinker's cookbook, and slime, which is no package. Needs `make setup` and the network.
#
#   sh scripts/client_environment.sh
#   PYTHONPATH=.venv-clients/src/slime .venv-clients/bin/python scripts/client_table.py verl slime
#
# Nothing is installed into .venv; its packages are found after those of .venv-clients.
set -eu
cd "$(dirname "$0")/.."
verl=0.9.1
cookbook=0.6.1
slime=624b824a8

[ -x .venv/bin/python ] || { echo "no .venv: run make setup" >&2; exit 1; }
.venv/bin/python -m venv .venv-clients
packages=$(.venv-clients/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
{
    echo "$PWD/src"
    # Its .pth files too: one of them finds deltawire's kernels.
    .venv/bin/python -c 'import sysconfig
print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))'
} >"$packages/clients.pth"
# The clients themselves without what they name: the cookbook's renderers need Python 3.12 or more,
# and the recipes that run here do not use them.
pip=".venv-clients/bin/python -m pip --disable-pip-version-check install --quiet"
$pip --no-deps "verl==$verl" "tinker-cookbook==$cookbook"
$pip "verl==$verl" "chz>=0.4" "pyrage>=1.4" "blobfile>=3" termcolor fastapi uvicorn cachetools
if [ ! -d .venv-clients/src/slime ]; then
    git clone --quiet https://github.com/THUDM/slime .venv-clients/src/slime
fi
git -C .venv-clients/src/slime checkout --quiet "$slime"
echo "ready: .venv-clients, with verl $verl, tinker-cookbook $cookbook and slime at $slime"
