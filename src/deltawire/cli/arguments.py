"""Argument types and options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from deltawire.engines.registry import ENGINES
from deltawire.errors import InputError

if TYPE_CHECKING:
    from deltawire.launch.processes import ChildOptions
    from deltawire.runtime.trusted import ReaderTrust

BUCKET = "a folder, or a file://, s3://, gs:// or az:// URL"


def at_least(least: int) -> Callable[[str], int]:
    """Makes an argument type for whole numbers from ``least`` upward."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    number.__name__ = "number"  # argparse names the type in its own errors.
    return number


def seconds(text: str) -> float:
    """Parses a duration: finite, zero or more."""
    return _from_zero(text, "length of time")


def share(text: str) -> float:
    """Parses a share: finite, zero or more; one above 1 is never reached."""
    return _from_zero(text, "share")


def fraction(text: str) -> float:
    """Parses a share from 0 to 1."""
    if (value := share(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text} is above 1")
    return value


def _from_zero(text: str, kind: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no {kind}")
    return value


def add_run_url(parser: argparse.ArgumentParser) -> None:
    """Declares the positional argument that names a run."""
    parser.add_argument("run", metavar="RUN_URL", help=f"the run's bucket: {BUCKET}")


def split_version(arguments: argparse.Namespace, place: str = "run") -> None:
    """Sets the argument ``place`` and ``version`` of a command that takes ``RUN@V``, ``RUN@NAME``
    or ``--version``; raises `InputError` for two of them, and for a tag that the run does not
    have."""
    from deltawire.launch.branches.version_names import VersionName

    name = VersionName.parse(getattr(arguments, place))
    if (name.version, name.tag) == (None, None):
        return
    if arguments.version is not None:
        raise InputError("RUN@V and --version exclude each other", hint="give one of them")
    setattr(arguments, place, name.location)
    arguments.version = name.open(trust_of(arguments))[2] if name.tag else name.version


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Declares ``--precision``."""
    parser.add_argument(
        "--precision",
        default="",
        metavar="NAME",
        help="an exporter of train.also_publish: read the versions that it published",
    )


def location_of(location: str, precision: str, trust: ReaderTrust) -> str:
    """Returns the place of a run's versions in the ``--precision`` that was asked for; of the run
    itself without one. Raises `InputError` if the run does not publish it."""
    if not precision:
        return location
    from deltawire.runtime.lines import publication_bucket
    from deltawire.runtime.trusted import open_trusted

    return publication_bucket(open_trusted(location, trust), precision).url


def add_report(
    parser: argparse.ArgumentParser,
    option: str = "--follow",
    what: str = "which version this host holds",
) -> None:
    """Declares ``--no-report``."""
    parser.add_argument(
        "--no-report", action="store_true", help=f"with {option}, do not store in the run {what}"
    )


def report_place(arguments: argparse.Namespace, location: str = "") -> str:
    """Returns the run to which a reader reports: the one that it reads (``location``), also if it
    follows a further precision of it; empty for none."""
    return "" if arguments.no_report else location or arguments.run


def add_json(parser: argparse.ArgumentParser, text: str = "print one JSON object") -> None:
    """Declares ``--json``."""
    parser.add_argument("--json", action="store_true", help=text)


def add_seed(parser: argparse.ArgumentParser) -> None:
    """Declares ``--seed``."""
    parser.add_argument("--seed", type=int, help="replace the configuration's seed")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Declares ``--engine``."""
    parser.add_argument(
        "--engine",
        choices=tuple(ENGINES),
        help="the engine that workers sample from (default: the configuration's)",
    )


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Declares ``--shape``."""
    parser.add_argument(
        "--shape",
        default="",
        metavar="NAME|FILE",
        help="start from a training shape, as deltawire shapes names or writes it: ranks, "
        "micro-batches, checkpointing, offload and adapter follow from it",
    )


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Declares what each process of a run accepts: its key, what it trusts, and the options that a
    supervisor gives to the processes it starts."""
    add_key(parser)
    add_trust(parser)
    parser.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cpus", default="", help="run on these processors only, such as 0,1")


def child_options(arguments: argparse.Namespace) -> ChildOptions:
    """The options of `add_process_options`."""
    from deltawire.launch.processes import ChildOptions

    return ChildOptions(arguments.supervised, arguments.cpus, arguments.key, trust_of(arguments))


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Declares the options that say which run, and how old a state of it, a command accepts."""
    parser.add_argument(
        "--public-key",
        default="",
        metavar="KEY[:RUN_ID]",
        help="refuse what the owner of this key, or processes it granted keys to, did not sign; "
        "and any other run than this one",
    )
    parser.add_argument(
        "--max-age",
        type=seconds,
        metavar="S",
        help="with --public-key: refuse a newest state that was signed longer ago",
    )
    parser.add_argument(
        "--allow-rollback",
        action="store_true",
        help="with --public-key: accept an older version than one read on this machine before",
    )


def trust_of(arguments: argparse.Namespace) -> ReaderTrust:
    """The options of `add_trust`; raises `InputError` for a malformed key."""
    from deltawire.runtime.trusted import ReaderTrust
    from deltawire.wire.roles import Pin

    if not arguments.public_key and (arguments.max_age is not None or arguments.allow_rollback):
        raise InputError(
            "--max-age and --allow-rollback need --public-key",
            hint="without it nobody's signature is insisted on",
        )
    pin = Pin.parse(arguments.public_key) if arguments.public_key else None
    return ReaderTrust(pin, arguments.max_age, arguments.allow_rollback)


def add_key(parser: argparse.ArgumentParser) -> None:
    """Declares ``--key``."""
    parser.add_argument("--key", default="", metavar="FILE", help="sign with this private key")


def add_secret(parser: argparse.ArgumentParser) -> None:
    """Declares ``--secret``, the file of a deployment's secret."""
    parser.add_argument(
        "--secret",
        default="",
        metavar="FILE",
        help="the secret of the deployment (default: DELTAWIRE_LIVE_SECRET, else the run's file "
        "below $XDG_STATE_HOME)",
    )


def add_user(parser: argparse.ArgumentParser) -> None:
    """Declares the user that a command is about, and what finds its pseudonyms."""
    parser.add_argument("user", metavar="USER", help="the name that requests gave, or - to read it")
    add_secret(parser)
    parser.add_argument(
        "--without-gateway",
        action="append",
        default=[],
        metavar="NAME",
        help="leave out what this gateway stored, whose key is lost; may be repeated",
    )


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of commands that start a whole job: its limits, its key, and what they
    print."""
    parser.add_argument(
        "--max-hours", type=float, metavar="H", help="stop this session after so many hours"
    )
    parser.add_argument(
        "--max-dollars",
        type=float,
        metavar="D",
        help="stop it once it has cost this much, at --hourly-dollars",
    )
    parser.add_argument(
        "--hourly-dollars", type=float, metavar="D", help="what the run's machines cost in an hour"
    )
    parser.add_argument(
        "--notify",
        default="",
        metavar="COMMAND",
        help="run this if the run fails, commits no version for faults.long_s once its processes "
        "were started, or reaches a limit, with DELTAWIRE_EVENT (failed, stalled, limit), "
        "DELTAWIRE_RUN and DELTAWIRE_REASON",
    )
    add_key(parser)
    parser.add_argument(
        "--allow-rollback",
        action="store_true",
        help="with --key: continue from an older version than one seen on this machine before",
    )
    parser.add_argument("--plain", action="store_true", help="print lines, not a live view")
    add_json(parser, "print report.json at the end")


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Declares ``--threads``."""
    parser.add_argument(
        "--threads", type=at_least(1), metavar="N", help="threads of the codec (default: all cores)"
    )


def add_grace(parser: argparse.ArgumentParser) -> None:
    """Declares how long pruned objects stay."""
    parser.add_argument(
        "--grace",
        type=seconds,
        default=24.0,
        metavar="HOURS",
        help="keep pruned objects this long for readers of old versions (default: 24)",
    )


def add_retention(parser: argparse.ArgumentParser) -> None:
    """Declares the options of commands that prune and compact."""
    add_grace(parser)
    parser.add_argument(
        "--compaction-strides",
        default="4,16,64",
        metavar="N,N,…",
        help="make compacted deltas over these strides; each divides the next (default: 4,16,64)",
    )


def add_address(parser: argparse.ArgumentParser, *, port: int) -> None:
    """Declares where a server listens."""
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=port, help="the port to listen on; 0 is any")


def add_tls(parser: argparse.ArgumentParser) -> None:
    """Declares the certificate of a server and its key."""
    parser.add_argument(
        "--tls-cert", default="", metavar="FILE", help="serve https with this PEM certificate"
    )
    parser.add_argument("--tls-key", default="", metavar="FILE", help="the certificate's key")


def add_count(
    parser: argparse.ArgumentParser, flag: str, default: int, text: str, *, least: int = 1
) -> None:
    """Declares a whole number of at least ``least``; ``text`` describes it."""
    parser.add_argument(
        flag,
        type=at_least(least),
        default=default,
        metavar="N",
        help=f"{text} (default: %(default)s)",
    )


def add_token_file(parser: argparse.ArgumentParser) -> None:
    """Declares ``--token-file``."""
    parser.add_argument(
        "--token-file",
        default="",
        metavar="FILE",
        help="holds the bearer token (default: $DELTAWIRE_TOKEN, or a generated one)",
    )


def add_window(parser: argparse.ArgumentParser) -> None:
    """Declares ``--window``."""
    parser.add_argument(
        "--window",
        type=float,
        default=300.0,
        metavar="S",
        help="measure figures over this many recent seconds (default: 300)",
    )
