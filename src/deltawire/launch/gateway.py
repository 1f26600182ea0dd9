"""Serves users through vLLM or SGLang servers, with receipts and feedback, until a signal comes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from deltawire.chat.requests import RequestDefaults
from deltawire.config import RunConfig
from deltawire.display import safe_line
from deltawire.errors import InputError
from deltawire.launch.listening import check_port, listening, require_token, tls_context
from deltawire.launch.live_secret import SecretPlace
from deltawire.launch.role_keys import read_signer
from deltawire.launch.server_logs import configure_logs
from deltawire.launch.tokens import ADMIN_TOKEN_VARIABLE, TOKEN_VARIABLE, read_token
from deltawire.launch.upstreams import UpstreamPlace, read_filter, read_judges, read_upstreams
from deltawire.live.capture.consent import ConsentRule, read_users
from deltawire.live.capture.names import name_in
from deltawire.live.capture.redaction import Redaction, load_redact
from deltawire.live.deployment_secret import DeploymentSecret
from deltawire.live.erasure.coverage import uncovered_gateways
from deltawire.live.feedback.client import RECEIPT_HEADER
from deltawire.live.feedback.limits import FeedbackLimits
from deltawire.live.gateway.answer_ids import ANSWER_HEADER
from deltawire.live.gateway.app import LiveCalls
from deltawire.live.gateway.recorder import Recorder, RecorderOptions
from deltawire.private_files import open_private, private_folder
from deltawire.runtime.highest_version import state_folder
from deltawire.runtime.needs import config_of
from deltawire.runtime.trusted import ANY, ReaderTrust, open_trusted
from deltawire.serving.app import TOKENS, Tokens
from deltawire.serving.client_keys import ClientKeys, ClientLimits, read_clients
from deltawire.serving.contract import ReplicaSetState
from deltawire.serving.cors import check_origins
from deltawire.serving.replica_set import ReplicaSet
from deltawire.serving.replica_sources import (
    ReplicaFile,
    ReplicaFollower,
    ReplicaName,
    ReplicaSource,
    check_replica_url,
)
from deltawire.store import Bucket, without_retries
from deltawire.sync import read_run
from deltawire.wire.roles import GATEWAY_ROLE
from deltawire.wire.run import Run

REPLICA_KEY_VARIABLE = "DELTAWIRE_REPLICA_KEY"
REPORT_EVERY_S = 1.0
TOKENS_EVERY_S = 10.0
MOST_NAME = 256
MOST_FILES = 65_536
_LOG = logging.getLogger("deltawire.live")


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """Where to listen, how replicas change versions, and what is stored of answers.

    ``key`` signs in a signed run. ``secret`` is the file of the deployment's secret (see
    `deltawire.launch.live_secret.SecretPlace.of`).
    """

    replicas: Sequence[str]
    replicas_file: str = ""
    replicas_dns: str = ""
    host: str = "127.0.0.1"
    port: int = 8400
    token_file: str = ""
    admin_token_file: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    transition: Literal["async", "sync"] = "async"
    drain_s: float = 90.0
    first_token_s: float = 60.0
    silence_s: float = 60.0
    whole_answer_s: float = 600.0
    model: str = ""
    model_names: Sequence[str] = ()
    clients: str = ""
    upstreams: Sequence[str] = ()
    upstream_models: Sequence[str] = ()
    upstream_key_files: Sequence[str] = ()
    judges: Sequence[str] = ()
    judge_key_files: Sequence[str] = ()
    judge_share: float = 1.0
    filter_request: str = ""
    filter_answer: str = ""
    filter_key_file: str = ""
    filter_failure: Literal["closed", "open"] = "closed"
    trust: ReaderTrust = ANY
    key: str = ""
    secret: str = ""
    state: str = ""
    spool_mb: int = 1024
    capture_header: bool = False
    capture_users: str = ""
    capture_share: float = 0.0
    redact: str = ""
    redact_failure: Literal["closed", "open"] = "closed"
    keep_text: bool = False
    feedback_per_minute: int = 60
    feedback_per_day: int = 1000
    webhook_secret_file: str = ""
    log_format: Literal["text", "json"] = "text"
    cors_origins: Sequence[str] = ()


def run_gateway(location: str, options: GatewayOptions) -> None:
    """Serves a run until a signal comes.

    Tokens that were not given are generated and printed, but only to a terminal: output that goes
    to a file must not contain them.
    """
    console = Console(stderr=True, highlight=False)
    configure_logs(options.log_format)
    for url in options.replicas:
        check_replica_url("--replica", url)
    source = _source(options)
    upstreams = read_upstreams(
        options.upstreams, options.upstream_models, options.upstream_key_files
    )
    if not options.replicas and source is None and not upstreams:
        raise InputError("a gateway needs a server", hint="give --replica URL, or --upstream")
    clients = ClientKeys(read_clients(options.clients) if options.clients else {})
    check_port(options.port)
    check_origins(options.cors_origins)
    if any(not 0 < len(name) <= MOST_NAME for name in options.model_names):
        raise InputError(f"a --model-name has 1 to {MOST_NAME} characters")
    if options.drain_s <= 0:
        raise InputError("--drain must be above 0")
    for name in ("first_token_s", "silence_s", "whole_answer_s"):
        if not getattr(options, name) > 0:
            raise InputError(f"--{name.replace('_', '-')} must be above 0")
    signer = read_signer(options.key)
    bucket = open_trusted(location, options.trust, signer=signer, role=GATEWAY_ROLE)
    bucket.check_writer()
    run = read_run(bucket)
    place = SecretPlace.of(options.secret, run)
    secret = place.read(bucket, run)
    token = require_token(console, "token", options.token_file, TOKEN_VARIABLE)
    admin = require_token(console, "admin token", options.admin_token_file, ADMIN_TOKEN_VARIABLE)
    Tokens(token, admin)  # Refused now, not after the bucket was read.
    folder = _state_folder(options, run)
    # A gateway that serves asks again by itself, and its users must not wait for the store.
    once = without_retries(bucket)
    with locked(folder):
        _refuse_an_older_key(bucket, folder, secret)
        calls = _live_calls(options, once, run, folder, secret, lambda: place.read(once, run))
        beside = upstreams, clients, source
        asyncio.run(_serve(options, beside, once, run, (token, admin), calls, console))


def _state_folder(options: GatewayOptions, run: Run) -> Path:
    place = Path(options.state) if options.state else state_folder().parent / "gateways" / run.id
    return private_folder(place)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a gateway's state folder; raises `InputError` if another process does."""
    descriptor = open_private(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(
                f"another gateway uses {folder}", hint="give each gateway its own --state"
            ) from error
        yield
    finally:
        os.close(descriptor)


def _refuse_an_older_key(bucket: Bucket, folder: Path, secret: DeploymentSecret) -> None:
    """Raises `InputError` if this gateway stored users under another key before, which the secret
    has not adopted: no erasure would find them."""
    reason = uncovered_gateways(bucket, secret).get(name_in(folder), "")
    if reason:
        raise InputError(
            f"this gateway stored users under another key before: {reason}",
            hint="adopt its private key (deltawire live secret adopt --help), which is "
            f"{folder / 'gateway.key'} unless it had --key; if it is lost, give --state "
            "another folder",
            run=bucket.url,
        )


def _live_calls(
    options: GatewayOptions,
    bucket: Bucket,
    run: Run,
    folder: Path,
    secret: DeploymentSecret,
    reread: Callable[[], DeploymentSecret],
) -> LiveCalls:
    def consent() -> ConsentRule:
        listed = frozenset[str]()
        if options.capture_users:
            listed = read_users(options.capture_users, secret.oldest.pseudonyms)
        return ConsentRule(options.capture_header, listed, options.capture_share)

    redact = load_redact(options.redact) if options.redact else None
    config = config_of(run, url=bucket.url) if run.config else RunConfig(name="live")
    webhook = ""
    if options.webhook_secret_file:
        webhook = read_token(options.webhook_secret_file)
    recorder = Recorder(
        bucket,
        run,
        folder,
        secret,
        Redaction(redact, on_failure=options.redact_failure),
        RecorderOptions(
            consent=consent(),
            keep_text=options.keep_text,
            spool_bytes=options.spool_mb << 20,
            limits=FeedbackLimits(options.feedback_per_minute, options.feedback_per_day),
            retain=config.retain,
            ranges=config.live.ranges,
            judges=read_judges(options.judges, options.judge_key_files, share=options.judge_share),
        ),
        reread=reread,
        reconsent=consent if options.capture_users else None,
    )
    defaults = RequestDefaults.of(config) if run.config else RequestDefaults()
    return LiveCalls(
        recorder,
        defaults,
        release=config.live.release,
        webhook_secret=webhook.encode(),
        model_names=options.model_names,
        filters=read_filter(
            options.filter_request,
            options.filter_answer,
            options.filter_key_file,
            open_on_failure=options.filter_failure == "open",
        ),
    )


def raise_file_limit() -> None:
    """Lets this process have as many open files as the machine permits: each request under way
    takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _source(options: GatewayOptions) -> ReplicaSource | None:
    """Returns where replicas come from that come and go; None for a fixed list."""
    given = [bool(options.replicas), bool(options.replicas_file), bool(options.replicas_dns)]
    if sum(given) > 1:
        raise InputError("give one of --replica, --replicas-file and --replicas-dns")
    if options.replicas_file:
        source = ReplicaFile(options.replicas_file)
        source.read()  # A file that cannot be read is refused at the start.
        return source
    return ReplicaName(options.replicas_dns) if options.replicas_dns else None


async def _serve(
    options: GatewayOptions,
    beside: tuple[Sequence[UpstreamPlace], ClientKeys, ReplicaSource | None],
    bucket: Bucket,
    run: Run,
    tokens: tuple[str, str],
    calls: LiveCalls,
    console: Console,
) -> None:
    from deltawire.serving.app import CallLimits, build_app, build_runner, build_session
    from deltawire.serving.cors import add_cors
    from deltawire.serving.request_ids import HEADER
    from deltawire.serving.upstream import OpenAIUpstream
    from deltawire.serving.vllm import VllmReplica

    upstreams, clients, source = beside
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    key = os.environ.get(REPLICA_KEY_VARIABLE, "")
    context = tls_context(options.tls_certificate, options.tls_key)
    raise_file_limit()
    async with build_session() as session:

        def replica_at(url: str) -> VllmReplica:
            return VllmReplica(url, session, key=key)

        replicas = ReplicaSet(
            bucket,
            run,
            [
                *map(replica_at, options.replicas),
                *(
                    OpenAIUpstream(one.name, one.url, session, model=one.model, key=one.key)
                    for one in upstreams
                ),
            ],
            transition=options.transition,
            drain_s=options.drain_s,
            changes=source is not None,
        )
        app = build_app(
            replicas,
            session,
            token=tokens[0],
            admin_token=tokens[1],
            upstream_model=options.model,
            clients=clients,
            limits=CallLimits(
                first_s=options.first_token_s,
                silence_s=options.silence_s,
                whole_s=options.whole_answer_s,
            ),
        )
        calls.add_to(app)
        if source is not None:
            app.cleanup_ctx.append(ReplicaFollower(replicas, source, replica_at).run)
        add_cors(app, options.cors_origins, exposed=(HEADER, ANSWER_HEADER, RECEIPT_HEADER))
        runner = build_runner(app)
        async with listening(
            runner,
            host=options.host,
            port=options.port,
            context=context,
            console=console,
            name=run.name,
        ):
            tokens_read = _TokenFiles(options, app[TOKENS], clients)
            await _report_changes(replicas, stopping, console, tokens_read)


class _TokenFiles:
    """Reads the files of tokens again, so that a token is replaced without a restart."""

    def __init__(self, options: GatewayOptions, tokens: Tokens, clients: ClientKeys) -> None:
        self._clients, self._listed = clients, options.clients
        self._listed_seen: dict[str, ClientLimits] = {}
        self._paths = options.token_file, options.admin_token_file
        self._tokens = tokens
        self._next_at = time.monotonic() + TOKENS_EVERY_S
        self._seen: list[str] = []
        self._fault = self._listed_fault = ""

    def poll(self) -> None:
        """Takes the tokens that the files hold now, once a second read finds the same: a file may
        be half written. Those before stay if they cannot be used."""
        if not (any(self._paths) or self._listed) or time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + TOKENS_EVERY_S
        self._poll_clients()
        now = self._tokens.sampling, self._tokens.admin
        try:
            found = [read_token(p) if p else t for p, t in zip(self._paths, now, strict=True)]
            if found != list(now):
                if found == self._seen:
                    self._tokens.replace(*found)
                    _LOG.info("tokens were replaced: those before are refused now")
                else:
                    self._next_at = time.monotonic() + min(TOKENS_EVERY_S, REPORT_EVERY_S)
            self._seen = found
        except InputError as error:
            self._seen = []
            if error.message != self._fault:
                _LOG.error("the tokens before stay in use: %s", error)
            self._fault = error.message
        else:
            self._fault = ""

    def _poll_clients(self) -> None:
        """Takes the clients that the file lists now, once a second read finds the same."""
        if not self._listed:
            return
        try:
            found = read_clients(self._listed)
        except InputError as error:
            if error.message != self._listed_fault:
                _LOG.error("the clients before stay in use: %s", error)
            self._listed_fault = error.message
            return
        self._listed_fault = ""
        if found != self._clients.limits and found == self._listed_seen:
            self._clients.replace(found)
            _LOG.info("the list of clients was replaced")
        elif found != self._clients.limits:
            self._next_at = time.monotonic() + min(TOKENS_EVERY_S, REPORT_EVERY_S)
        self._listed_seen = found


async def _report_changes(
    replicas: ReplicaSet, stopping: asyncio.Event, console: Console, tokens: _TokenFiles
) -> None:
    """Prints a line for each replica that changed, until ``stopping`` is set."""
    printed: dict[str, str] = {}
    while not stopping.is_set():
        await asyncio.to_thread(tokens.poll)
        for name, line in _lines(replicas.state()).items():
            if printed.get(name) != line:
                console.print(
                    safe_line(f"{name}: {line}"), soft_wrap=True, markup=False, emoji=False
                )
                printed[name] = line
        try:
            await asyncio.wait_for(stopping.wait(), REPORT_EVERY_S)
        except TimeoutError:
            continue
    print("stopped", file=sys.stderr)  # noqa: T201


def _lines(state: ReplicaSetState) -> dict[str, str]:
    lines = {}
    for replica in state.replicas:
        loading = replica.loading_state
        if replica.upstream:
            answers = "answers, nothing attests its weights"
            said = answers if replica.readiness else str(loading.stage)
            lines[replica.name] = said + (f": {loading.message}" if loading.message else "")
            continue
        words = [replica.current_snapshot_identity or "no snapshot", loading.stage]
        if loading.stage == "loading" and loading.target_snapshot_identity:
            words.append(loading.target_snapshot_identity)
        lines[replica.name] = " ".join(words) + (f": {loading.message}" if loading.message else "")
    return lines
