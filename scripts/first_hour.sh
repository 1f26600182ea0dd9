#!/bin/sh
# Runs the commands of README.md and docs/TUTORIAL.md as a new user would, in an empty environment
# with a wheel of this checkout. Small: two versions a run, and no make test. Needs make setup.
#
#     sh scripts/first_hour.sh               builds the wheel, and runs everything
#     LIMIT=1200 sh scripts/first_hour.sh    stops after so many seconds instead of 900
set -eu
cd "$(dirname "$0")/.."
exec .venv/bin/python scripts/first_hour.py --limit "${LIMIT:-900}" "$@"
