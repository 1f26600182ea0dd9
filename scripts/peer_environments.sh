#!/bin/sh
# Makes .venv-openenv and .venv-skyrl-gym: interpreters with packages whose pins exclude those of
# .venv. Servers and environments of them run with these, in processes of their own. Needs the
# network.
#
#   sh scripts/peer_environments.sh openenv skyrl-gym
#   make drills                                          # runs the tests that need them
set -eu
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
for name in "$@"; do
    case $name in
        openenv) package="openenv==0.10.0" ;;
        skyrl-gym) package="skyrl-gym==0.4.0" ;;
        *) echo "no environment for $name" >&2; exit 2 ;;
    esac
    "$python" -m venv ".venv-$name"
    ".venv-$name/bin/python" -m pip --disable-pip-version-check install --quiet "$package"
    echo "ready: .venv-$name, with $package"
done
