"""``deltawire serve``: the hot-load contract in front of vLLM servers."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_run_url, add_token_file, add_trust, trust_of


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("serve", help="the hot-load contract in front of vLLM servers")
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument(
        "--replica",
        action="append",
        required=True,
        metavar="URL",
        help="the URL of a vLLM server; repeat it for several",
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=8400, help="the port to listen on; 0 is any")
    add_token_file(parser)
    parser.add_argument(
        "--admin-token-file",
        default="",
        metavar="FILE",
        help="holds the token for hot-loading (default: DELTAWIRE_ADMIN_TOKEN, or generated)",
    )
    parser.add_argument(
        "--tls-cert", default="", metavar="FILE", help="serve https with this PEM certificate"
    )
    parser.add_argument("--tls-key", default="", metavar="FILE", help="the certificate's key")
    parser.add_argument(
        "--transition",
        choices=("async", "sync"),
        default="async",
        help="swap weights while requests run, or after they have ended",
    )
    parser.add_argument(
        "--drain",
        type=float,
        default=90.0,
        metavar="S",
        help="with --transition sync: wait this long for running requests (default: 90)",
    )
    parser.add_argument(
        "--model", default="", help="the replicas' name for the model (default: the request's)"
    )
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    from deltawire.launch.serving import ServeOptions, serve_run

    options = ServeOptions(
        replicas=arguments.replica,
        host=arguments.host,
        port=arguments.port,
        token_file=arguments.token_file,
        admin_token_file=arguments.admin_token_file,
        tls_certificate=arguments.tls_cert,
        tls_key=arguments.tls_key,
        transition=arguments.transition,
        drain_s=arguments.drain,
        model=arguments.model,
        trust=trust_of(arguments),
    )
    serve_run(arguments.run, options)
    return 0
