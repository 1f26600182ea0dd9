"""``deltawire tinker``: a server for Tinker's SDK, on a bucket."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_run_url, add_token_file, at_least


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("tinker", help="serve Tinker's SDK and cookbook from a bucket")
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="the base model: a Hugging Face directory"
    )
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="a name of the base model for clients, besides DIR and its last parts; repeatable",
    )
    parser.add_argument(
        "--parameters",
        choices=("full", "lora"),
        default="full",
        help="train all parameters, or the LoRA adapter that a client asks for (default: full)",
    )
    parser.add_argument(
        "--frozen-head",
        action="store_true",
        help="with --parameters lora: accept train_unembed=True, and leave the head frozen",
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=8600, help="the port to listen on; 0 is any")
    add_token_file(parser)
    parser.add_argument(
        "--tls-cert", default="", metavar="FILE", help="serve https with this PEM certificate"
    )
    parser.add_argument("--tls-key", default="", metavar="FILE", help="the certificate's key")
    parser.add_argument(
        "--models",
        type=at_least(1),
        default=4,
        metavar="N",
        help="models held in memory; others wait in the bucket (default: 4)",
    )
    parser.add_argument(
        "--samplers",
        type=at_least(1),
        default=4,
        metavar="N",
        help="engines held in memory, one for each version sampled from (default: 4)",
    )
    parser.add_argument(
        "--slots",
        type=at_least(1),
        default=64,
        metavar="N",
        help="sequences that an engine decodes at a time (default: 64)",
    )
    parser.add_argument(
        "--context",
        type=at_least(8),
        default=2048,
        metavar="N",
        help="tokens of a sequence that is sampled, prompt included (default: 2048)",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=at_least(1),
        default=16,
        metavar="N",
        help="optimizer steps between stored states, which a restart repeats (default: 16)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    from deltawire.launch.tinkering import TinkerLaunch, serve_tinker

    launch = TinkerLaunch(
        model=arguments.model,
        names=tuple(arguments.name),
        parameters=arguments.parameters,
        frozen_head=arguments.frozen_head,
        host=arguments.host,
        port=arguments.port,
        token_file=arguments.token_file,
        tls_certificate=arguments.tls_cert,
        tls_key=arguments.tls_key,
        models=arguments.models,
        samplers=arguments.samplers,
        slots=arguments.slots,
        context=arguments.context,
        checkpoint_every=arguments.checkpoint_every,
    )
    serve_tinker(arguments.run, launch)
    return 0
