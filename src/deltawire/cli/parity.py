"""``deltawire parity``: two engines on the same weights and prompts, and where they part."""

from __future__ import annotations

import argparse
import json

from deltawire.cli.arguments import add_json, add_trust, split_version, trust_of
from deltawire.cli.exit_codes import DIFFERENT, EXCEEDED


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("parity", help="compare two engines on the same weights")
    parser.set_defaults(call=run)
    parser.add_argument(
        "source", metavar="MODEL", help="a model directory, a run's bucket, or a CONFIG.toml"
    )
    parser.add_argument(
        "--version", type=int, metavar="N", help="the version of a run (default: the newest)"
    )
    parser.add_argument(
        "--left",
        default="transformers:bf16:decode",
        metavar="ENGINE",
        help="draws the tokens: transformers[:eager][:bf16][:decode], vllm[:bf16], sglang[:bf16]",
    )
    parser.add_argument(
        "--right",
        default="transformers:float32",
        metavar="ENGINE",
        help="the engine to compare with it",
    )
    parser.add_argument(
        "--prompts", default="", metavar="FILE", help="one prompt a line: text, or token ids"
    )
    parser.add_argument("--count", type=int, default=8, help="random prompts, without --prompts")
    parser.add_argument("--length", type=int, default=32, help="tokens of a random prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens drawn after each prompt")
    parser.add_argument("--seed", type=int, default=0, help="the seed of prompts and draws")
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto)"
    )
    parser.add_argument("--layers", action="store_true", help="compare layer by layer")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="the largest drift of a layer (default: by precision)",
    )
    parser.add_argument(
        "--replay", action="store_true", help="score again with the left engine's expert choices"
    )
    parser.add_argument("--limit", type=float, metavar="K3", help="exit with 3 if k3 exceeds this")
    parser.add_argument(
        "--plot", default="", metavar="FILE", help="draw the drift by layer: .svg, .png"
    )
    parser.add_argument(
        "--dump",
        default="",
        metavar="FILE.jsonl",
        help="instead: judge recorded tokens and log-probabilities by the model, and exit with 5 "
        "if something is wrong with them",
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="MODEL|RUN@V",
        help="with --dump: other models that may explain rows; may be repeated",
    )
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compares and prints; 3 if ``--limit`` is exceeded, 5 if something is wrong with a dump."""
    from rich.console import Console

    from deltawire.dashboard.parity_view import comparison_values, print_comparison
    from deltawire.launch.parity import ParityOptions, compare_engines

    split_version(arguments, "source")
    if arguments.dump:
        return run_dump(arguments)
    options = ParityOptions(
        left=arguments.left,
        right=arguments.right,
        version=arguments.version,
        prompts=arguments.prompts,
        count=arguments.count,
        length=arguments.length,
        tokens=arguments.tokens,
        seed=arguments.seed,
        layers=arguments.layers,
        tolerance=arguments.tolerance,
        replay=arguments.replay,
        plot=arguments.plot,
        device=arguments.device,
    )
    found, source = compare_engines(arguments.source, options, trust_of(arguments))
    console = Console()
    if arguments.json:
        console.print_json(
            json.dumps(comparison_values(found, source, arguments.limit)), ensure_ascii=True
        )
    else:
        print_comparison(found, source, console)
    exceeded = arguments.limit is not None and not found.divergence.k3 <= arguments.limit
    return EXCEEDED if exceeded else 0


def run_dump(arguments: argparse.Namespace) -> int:
    """Judges a dump and prints what is wrong with it."""
    from rich.console import Console

    from deltawire.display import safe_json
    from deltawire.launch.dump import examine_dump, print_dump

    report = examine_dump(
        arguments.source,
        arguments.dump,
        version=arguments.version,
        also=arguments.also,
        device=arguments.device,
        trust=trust_of(arguments),
    )
    if arguments.json:
        print(safe_json(report))  # noqa: T201
    else:
        print_dump(report, Console(highlight=False, soft_wrap=True))
    return 0 if report.sound else DIFFERENT
