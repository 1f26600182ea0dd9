"""``deltawire gateway``: serves users through servers of vLLM or SGLang, with receipts."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import (
    add_address,
    add_key,
    add_run_url,
    add_secret,
    add_tls,
    add_token_file,
    add_trust,
    at_least,
    share,
    trust_of,
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "gateway",
        help="serve users through vLLM or SGLang servers: receipts, feedback, hot-loading",
    )
    parser.set_defaults(call=run)
    add_run_url(parser)
    _add_replicas(parser)
    _add_upstreams(parser)
    add_address(parser, port=8400)
    add_token_file(parser)
    parser.add_argument(
        "--admin-token-file",
        default="",
        metavar="FILE",
        help="holds the token for hot-loading (default: DELTAWIRE_ADMIN_TOKEN, or generated)",
    )
    add_tls(parser)
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
    for name, default, what in (
        ("--first-token-s", 60.0, "fail a stream whose first piece takes longer"),
        ("--silence-s", 60.0, "fail a stream that pauses longer between two pieces"),
        ("--whole-answer-s", 600.0, "fail an answer in one piece that takes longer"),
    ):
        parser.add_argument(
            name, type=float, default=default, metavar="S", help=f"{what} (default: {default:g})"
        )
    parser.add_argument(
        "--model", default="", help="the replicas' name for the model (default: the request's)"
    )
    parser.add_argument(
        "--clients",
        default="",
        metavar="FILE",
        help="let clients sample by keys of their own, with rates and quotas (TOML; hashes of "
        "keys)",
    )
    parser.add_argument(
        "--model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="let clients ask for the model by this name; repeat it for several, '*' for any "
        "(default: the run's name, and those that the replicas list)",
    )
    add_key(parser)
    add_secret(parser)
    add_trust(parser)
    _add_capture(parser)
    _add_feedback(parser)
    _add_other_servers(parser)


def _add_replicas(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--replica",
        action="append",
        default=[],
        metavar="URL",
        help="the URL of a vLLM or SGLang server; repeat it for several",
    )
    parser.add_argument(
        "--replicas-file",
        default="",
        metavar="FILE",
        help="holds the replicas' URLs, one a line; read again while the gateway runs",
    )
    parser.add_argument(
        "--replicas-dns",
        default="",
        metavar="URL",
        help="take each address of this URL's host as a replica, and look it up again, such as "
        "http://replicas:8000 of a headless service",
    )


def _add_upstreams(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "upstreams", "models of other providers, which a decision may let serve users"
    )
    for name, metavar, what in (
        ("--upstream", "NAME=URL", "any OpenAI-compatible endpoint, by the URL of its clients"),
        ("--upstream-model", "NAME=MODEL", "its name for the model"),
        (
            "--upstream-key-file",
            "NAME=FILE",
            "holds its key (default: DELTAWIRE_UPSTREAM_KEY_NAME; none for a server without one)",
        ),
    ):
        group.add_argument(name, action="append", default=[], metavar=metavar, help=what)


def _add_other_servers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "filters and judges", "other servers, by URL, that see texts of users and answers"
    )
    for name, metavar, what in (
        ("--filter-request", "URL", "ask this server whether a request may be answered"),
        (
            "--filter-answer",
            "URL",
            "ask this server whether an answer may be shown; streams are held until their end",
        ),
        ("--filter-key-file", "FILE", "holds the key of both"),
    ):
        group.add_argument(name, default="", metavar=metavar, help=what)
    group.add_argument(
        "--filter-failure",
        choices=("closed", "open"),
        default="closed",
        help="if a filter does not answer: show nothing, or everything (default: closed)",
    )
    for name, metavar, what in (
        ("--judge", "NAME=URL", "have this server score stored answers, as judged_NAME"),
        ("--judge-key-file", "NAME=FILE", "holds its key"),
    ):
        group.add_argument(name, action="append", default=[], metavar=metavar, help=what)
    group.add_argument(
        "--judge-share",
        type=share,
        default=1.0,
        metavar="SHARE",
        help="have this share of stored answers scored (default: 1)",
    )


def _add_capture(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("capture", "without one of the first three nothing is stored")
    group.add_argument(
        "--capture-header",
        action="store_true",
        help="store answers to requests with x-deltawire-capture: true",
    )
    group.add_argument(
        "--capture-users", default="", metavar="FILE", help="store answers to the users listed here"
    )
    group.add_argument(
        "--capture-share",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="store answers to this share of users",
    )
    group.add_argument(
        "--redact",
        default="",
        metavar="MODULE:FUNCTION",
        help="pass texts through this function before anything is stored",
    )
    group.add_argument(
        "--redact-failure",
        choices=("closed", "open"),
        default="closed",
        help="if that function fails: store nothing, or the texts as they are (default: closed)",
    )
    group.add_argument(
        "--keep-text", action="store_true", help="store redacted texts too, not only tokens"
    )
    group.add_argument(
        "--state",
        default="",
        metavar="DIR",
        help="where captures wait for the bucket (default: below $XDG_STATE_HOME)",
    )
    group.add_argument(
        "--spool-mb",
        type=at_least(1),
        default=1024,
        metavar="MB",
        help="let captures that wait take this much disk, and as much feedback (default: 1024)",
    )


def _add_feedback(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("feedback")
    group.add_argument(
        "--feedback-per-minute", type=at_least(1), default=60, metavar="N", help="of one user"
    )
    group.add_argument(
        "--feedback-per-day", type=at_least(1), default=1000, metavar="N", help="of one user"
    )
    group.add_argument(
        "--webhook-secret-file",
        default="",
        metavar="FILE",
        help="take signed lists of reports at /v1/feedback/webhook",
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="write the log as lines, or as a JSON object a line",
    )
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin call the gateway from a browser; repeat it for several",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until a signal comes."""
    from deltawire.launch.gateway import GatewayOptions, run_gateway

    options = GatewayOptions(
        replicas=arguments.replica,
        replicas_file=arguments.replicas_file,
        replicas_dns=arguments.replicas_dns,
        host=arguments.host,
        port=arguments.port,
        token_file=arguments.token_file,
        admin_token_file=arguments.admin_token_file,
        tls_certificate=arguments.tls_cert,
        tls_key=arguments.tls_key,
        transition=arguments.transition,
        drain_s=arguments.drain,
        first_token_s=arguments.first_token_s,
        silence_s=arguments.silence_s,
        whole_answer_s=arguments.whole_answer_s,
        model=arguments.model,
        model_names=arguments.model_name,
        clients=arguments.clients,
        upstreams=arguments.upstream,
        upstream_models=arguments.upstream_model,
        upstream_key_files=arguments.upstream_key_file,
        judges=arguments.judge,
        judge_key_files=arguments.judge_key_file,
        judge_share=arguments.judge_share,
        filter_request=arguments.filter_request,
        filter_answer=arguments.filter_answer,
        filter_key_file=arguments.filter_key_file,
        filter_failure=arguments.filter_failure,
        trust=trust_of(arguments),
        key=arguments.key,
        secret=arguments.secret,
        state=arguments.state,
        spool_mb=arguments.spool_mb,
        capture_header=arguments.capture_header,
        capture_users=arguments.capture_users,
        capture_share=arguments.capture_share,
        redact=arguments.redact,
        redact_failure=arguments.redact_failure,
        keep_text=arguments.keep_text,
        feedback_per_minute=arguments.feedback_per_minute,
        feedback_per_day=arguments.feedback_per_day,
        webhook_secret_file=arguments.webhook_secret_file,
        log_format=arguments.log_format,
        cors_origins=arguments.cors_origin,
    )
    run_gateway(arguments.run, options)
    return 0
