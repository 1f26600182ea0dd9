"""``deltawire verify-training``: a run's training, computed again by intervals."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from deltawire.cli.arguments import add_json, add_run_url, add_trust, at_least, trust_of
from deltawire.cli.exit_codes import DIFFERENT, UNDECIDED
from deltawire.errors import InputError

if TYPE_CHECKING:
    from deltawire.launch.branches.proof_check import ProofCheck


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "verify-training", help="compute a run's training again, or intervals drawn at random"
    )
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument(
        "--spot",
        type=at_least(1),
        metavar="N",
        help="check N intervals between stored states, drawn at random (default: all)",
    )
    parser.add_argument(
        "--proof", default="", metavar="DIR", help="also compare the statements of deltawire prove"
    )
    parser.add_argument(
        "--signed-by", default="", metavar="KEY", help="the public key that signed the statements"
    )
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Computes the steps; 0 if all are exact, 5 if one differs, 11 if none could be checked."""
    import dataclasses
    from pathlib import Path

    import msgspec

    from deltawire.dashboard.verification import lines_of_check
    from deltawire.display import safe_json, safe_line
    from deltawire.launch.branches.proof_check import ProofCheck, check_proof
    from deltawire.launch.progress import counting
    from deltawire.rl.trainer.verify_intervals import verify_intervals
    from deltawire.runtime.trusted import open_trusted
    from deltawire.sync import read_run
    from deltawire.wire.roles import Pin

    def expect(doubts: list[str]) -> None:
        for one in doubts:
            print(  # noqa: T201
                safe_line(f"exactness cannot be expected: {one}"), file=sys.stderr
            )

    if bool(arguments.proof) != bool(arguments.signed_by):
        raise InputError("--proof and --signed-by go together", hint="give both, or neither")
    bucket = open_trusted(arguments.run, trust_of(arguments))
    proof = ProofCheck()
    with counting(hidden=arguments.json) as show:
        if arguments.proof:
            proof = check_proof(
                bucket,
                read_run(bucket),
                Path(arguments.proof),
                Pin.parse(arguments.signed_by).public_key,
                progress=lambda done, total: show("comparing statements", done, total),
            )
        found = verify_intervals(
            bucket,
            spot=arguments.spot,
            progress=lambda done, total: show("repeating steps", done, total),
            expect=expect,
        )
    if arguments.json:
        body = {**dataclasses.asdict(found), "exact": found.exact}
        if arguments.proof:
            body["proof"] = msgspec.to_builtins(proof)
        print(safe_json(body))  # noqa: T201
    else:
        for line in [*_lines(proof, arguments.proof), *lines_of_check(found)]:
            print(safe_line(line))  # noqa: T201
    if proof.faults or not found.exact:
        return DIFFERENT
    return 0 if found.versions else UNDECIDED


def _lines(proof: ProofCheck, folder: str) -> Iterator[str]:
    """Yields what the comparison of the statements found."""
    if not folder:
        return
    yield f"{proof.versions} statements agree with the bucket"
    if proof.not_compared:
        yield f"{proof.not_compared} statements not compared: retention deleted their versions"
    for name in proof.lines_not_compared:
        yield f"{name}: not compared: no statement is about this line"
    if proof.unlinked:
        yield (
            f"{proof.unlinked} groups are gone, erased or deleted by retention: their commitments "
            "belong to nothing any more"
        )
    for version, reason in sorted(proof.faults.items()):
        yield f"version {version}: {reason}"
