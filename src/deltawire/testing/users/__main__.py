"""Sends simulated users to a gateway: ``python -m deltawire.testing.users URL --seconds 60``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

import msgspec

from deltawire.errors import DeltawireError, InputError
from deltawire.testing.users.driver import UserDriver
from deltawire.testing.users.population import Population, UserSettings

TOKEN_VARIABLE = "DELTAWIRE_TOKEN"  # noqa: S105 - the name of a variable


def main(arguments: list[str] | None = None) -> int:
    """Drives a gateway, and prints what its users thought."""
    parser = argparse.ArgumentParser(
        prog="python -m deltawire.testing.users",
        description=f"Sends simulated users to a gateway, whose token is in {TOKEN_VARIABLE}.",
    )
    parser.add_argument("url", help="the gateway, such as http://127.0.0.1:8400")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second (default: 10)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"what users do: {', '.join(UserSettings.__struct_fields__)}",
    )
    parser.add_argument("--notes", default="", metavar="FILE", help="write one JSON line an answer")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse_args(arguments)
    try:
        return _run(parsed)
    except DeltawireError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code


def settings_of(pairs: list[str]) -> UserSettings:
    """Returns the settings that ``KEY=VALUE`` pairs give; raises `InputError`."""
    values = dict(pair.partition("=")[::2] for pair in pairs)
    try:
        return msgspec.convert(values, UserSettings, strict=False)
    except msgspec.ValidationError as error:
        raise InputError(f"--set: {error}", hint="see --help for the keys") from error


def _run(parsed: argparse.Namespace) -> int:
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise InputError(f"there is no token in {TOKEN_VARIABLE}", hint="set it to the gateway's")
    if not (parsed.seconds > 0 and parsed.rate > 0):
        raise InputError("--seconds and --rate must be above 0")
    population = Population(settings_of(parsed.set))
    driver = UserDriver(parsed.url, token, population)
    result = asyncio.run(driver.drive(rate=parsed.rate, seconds=parsed.seconds))
    if parsed.notes:
        lines = b"".join(msgspec.json.encode(note) + b"\n" for note in result.notes)
        Path(parsed.notes).write_bytes(lines)
    if not result.notes:
        raise InputError(f"no request was answered; {result.counts['failed']} failed")
    third = parsed.seconds / 3
    figures = {
        **result.counts,
        "answers": len(result.notes),
        "satisfaction_first_third": result.satisfaction(until=third),
        "satisfaction_last_third": result.satisfaction(since=2 * third),
        "indifferent": population.indifferent(),
        "optimum": population.optimum(parsed.seconds),
    }
    if parsed.json:
        print(json.dumps(figures))  # noqa: T201
    else:
        for name, value in figures.items():
            print(f"{name:26} {value:.6g}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
