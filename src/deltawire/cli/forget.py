"""``deltawire forget``: deletes what was stored of a live user."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from deltawire.cli.arguments import add_json, add_key, add_run_url, add_trust, add_user, trust_of
from deltawire.cli.exit_codes import FORKED, UNKNOWN_USER

if TYPE_CHECKING:
    from deltawire.launch.fork_erasure import ForkErasure
    from deltawire.launch.live_users import Erasure


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "forget",
        help="delete what was stored of a live user",
        description="Deletes what all gateways stored of a user, under the pseudonyms of all "
        f"generations of the deployment's secret. Exit code {UNKNOWN_USER}: nothing was ever "
        f"stored under this name; {FORKED}: forks of the run began with weights that were trained "
        "on the user, or still hold something.",
    )
    parser.set_defaults(call=run)
    add_run_url(parser)
    add_user(parser)
    parser.add_argument(
        "--learner-key",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="in a signed run: the private key of the learner NAME; may be repeated",
    )
    parser.add_argument(
        "--no-learner",
        action="append",
        default=[],
        metavar="NAME",
        help="NAME is no learner: its lineages are forged, and all of them are deleted; may be "
        "repeated",
    )
    parser.add_argument(
        "--no-trainer",
        action="store_true",
        help="no trainer will go on with this run or its forks: also delete groups that one would "
        "need to compute the steps after its newest checkpoint again; refused while one is alive",
    )
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="also restore the last weights that were not trained on the user",
    )
    add_key(parser)
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Delete it, and print which versions were trained on it."""
    from deltawire.launch.live_users import UserOptions, forget_by_name

    options = UserOptions(
        trust=trust_of(arguments),
        key=arguments.key,
        secret=arguments.secret,
        without=arguments.without_gateway,
    )
    done = forget_by_name(
        arguments.run,
        arguments.user,
        options,
        learner_keys=arguments.learner_key,
        no_learners=arguments.no_learner,
        no_trainer=arguments.no_trainer,
        rebuild=arguments.rebuild,
    )
    code = FORKED if done.unfinished else 0 if done.known else UNKNOWN_USER
    if arguments.json:
        body = {name: getattr(done.record, name) for name in done.record.__struct_fields__}
        body |= {"known": done.known, "pseudonyms": list(done.pseudonyms)}
        body |= {"old_versions": done.old_versions, "without": list(options.without)}
        body |= {"forks": [one.url for one in done.forks]}
        body |= {"in_forks": [_fork(one) for one in done.in_forks]}
        if done.rebuild is not None:
            body["rebuild"] = done.rebuild._asdict()
        print(json.dumps(body))  # noqa: T201
        return code
    for line in _lines(done, options.without):
        print(line)  # noqa: T201
    return code


def _fork(one: ForkErasure) -> dict[str, Any]:
    return {**one._asdict(), "forks": [fork.url for fork in one.forks]}


def _lines(done: Erasure, without: Sequence[str]) -> Iterator[str]:
    record, rebuild = done.record, done.rebuild
    if done.known:
        trained = ", ".join(map(str, record.versions)) or "none"
        yield (
            f"deleted {record.answers} answers, {record.feedback} reports and "
            f"{len(record.groups)} groups of user {record.user}; versions trained on them: "
            f"{trained}"
        )
    else:
        yield (
            "unknown user: nothing is stored under this name, nor was. Check the spelling: it must "
            "be the name that requests give. From now on gateways store nothing of this name; "
            "deltawire live readmit takes that back"
        )
    if without:
        yield f"not searched, because their keys are lost: {', '.join(without)}"
    if done.old_versions == "kept":
        yield (
            "the store keeps old versions of objects: what was deleted stays in them until the "
            "store's lifecycle rules, or you, delete them"
        )
    elif done.old_versions == "unknown":
        yield "it cannot be told here whether the store keeps old versions of objects: check it"
    for one in done.in_forks:
        if one.failure:
            yield f"the fork {one.url} still holds the user: {one.failure}; run the command again"
        elif one.known or one.versions:
            trained = ", ".join(map(str, one.versions)) or "none"
            yield (
                f"in the fork {one.url}: deleted {one.answers} answers, {one.feedback} reports and "
                f"{one.groups} groups; versions trained on them: {trained}"
            )
    for fork in done.forks:
        note = f", and then its note {fork.note}" if fork.note else ""
        yield (
            f"the fork {fork.url} began with weights that were trained on the user: delete "
            f"it{note}, or fork an earlier version; if it serves users with a secret of its own, "
            "run forget on it too"
        )
    if rebuild is not None and rebuild.restores is None:
        yield "rebuild: the newest version does not come from the user's answers"
    elif rebuild is not None:
        yield (
            f"rebuild: decision {rebuild.decision} asks the trainer to restore version "
            f"{rebuild.restores}; deltawire live status shows when it has"
        )
