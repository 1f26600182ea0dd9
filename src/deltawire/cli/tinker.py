"""``deltawire tinker``: a server for Tinker's SDK, on a bucket."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_address, add_count, add_run_url, add_tls, add_token_file


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
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
        help="with --parameters lora: accept train_unembed=True, and leave the head frozen; for a "
        "model that ties it to the embedding",
    )
    # Those that are 0 where the advantage is: recipes fill prompts with zeros.
    parser.add_argument(
        "--stable-reinforce",
        choices=("importance_sampling", "ppo", "cispo"),
        default="",
        help="compute this loss where a client asks for stable_reinforce, the default of most "
        "recipes, which has no public formula (default: refuse it)",
    )
    add_address(parser, port=8600)
    add_token_file(parser)
    add_tls(parser)
    add_count(parser, "--ranks", 1, "processes on this machine that compute for each model")
    add_count(parser, "--models", 4, "models held in memory; others wait in the bucket")
    add_count(parser, "--samplers", 4, "engines held in memory, one for each version sampled from")
    add_count(parser, "--slots", 64, "sequences that an engine decodes at a time")
    add_count(
        parser, "--context", 2048, "tokens of a sequence that is sampled, prompt included", least=8
    )
    add_count(
        parser,
        "--checkpoint-every",
        16,
        "optimizer steps between stored states, which a restart repeats",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until a signal comes."""
    from deltawire.launch.tinker import TinkerLaunch, serve_tinker

    launch = TinkerLaunch(
        model=arguments.model,
        names=tuple(arguments.name),
        parameters=arguments.parameters,
        frozen_head=arguments.frozen_head,
        stable_reinforce=arguments.stable_reinforce,
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
        ranks=arguments.ranks,
    )
    serve_tinker(arguments.run, launch)
    return 0
