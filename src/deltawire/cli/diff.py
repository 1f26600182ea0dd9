"""``deltawire diff``: what differs between two versions, in bits and in behavior."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from deltawire.cli.arguments import add_count, add_json, add_trust, at_least, trust_of

if TYPE_CHECKING:
    from deltawire.launch.branches.answer_differences import AnswerDifference
    from deltawire.store import Bucket
    from deltawire.wire.run import Run


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "diff", help="compare two versions, also of two runs: their bits, and their answers"
    )
    parser.set_defaults(call=run)
    parser.add_argument("old", metavar="RUN_URL@V", help="a version of a run")
    parser.add_argument("new", metavar="RUN_URL[@V]", help="another version, or the newest")
    parser.add_argument(
        "--answers",
        action="store_true",
        help="compare answers too, to prompts that the newer version's run has stored",
    )
    parser.add_argument(
        "--on", default="", metavar="FILE", help='compare answers to these: rows with "prompt"'
    )
    add_count(parser, "--prompts", 16, "with answers: ask at most so many prompts")
    add_count(parser, "--seeds", 1, "with answers: draw so many to each prompt")
    parser.add_argument(
        "--max-tokens",
        type=at_least(1),
        metavar="N",
        help="with answers: the longest one (default: the run's)",
    )
    parser.add_argument(
        "--page", default="", metavar="FILE", help="write a page with pictures, such as diff.html"
    )
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compares them."""
    import msgspec
    from rich.console import Console

    from deltawire.display import safe_json
    from deltawire.launch.branches.differences import compare_bits
    from deltawire.launch.branches.printing import print_bits
    from deltawire.launch.branches.version_names import open_version

    trust = trust_of(arguments)
    old, new = open_version(arguments.old, trust), open_version(arguments.new, trust)
    bits = compare_bits(old, new)
    answers = _answers(arguments, old, new)
    if arguments.page:
        from deltawire.launch.branches.difference_page import write_page

        names = [f"{run.name}@{version}" for _, run, version in (old, new)]
        write_page(Path(arguments.page), names[0], names[1], bits, answers)
    if arguments.json:
        found = msgspec.structs.asdict(bits)
        print(safe_json(found | ({} if answers is None else {"answers": answers})))  # noqa: T201
        return 0
    console = Console(highlight=False, soft_wrap=True)
    print_bits(bits, console)
    if answers is not None:
        from deltawire.launch.branches.printed_answers import print_answers

        print_answers(answers, console)
    return 0


def _answers(
    arguments: argparse.Namespace, old: tuple[Bucket, Run, int], new: tuple[Bucket, Run, int]
) -> AnswerDifference | None:
    if not (arguments.answers or arguments.on):
        return None
    from deltawire.launch.branches.answer_differences import AnswerSettings, compare_answers
    from deltawire.launch.progress import counting

    settings = AnswerSettings(
        file=arguments.on,
        prompts=arguments.prompts,
        seeds=arguments.seeds,
        max_tokens=arguments.max_tokens,
    )
    with counting(hidden=arguments.json) as show:
        return compare_answers(old, new, settings, progress=show)
