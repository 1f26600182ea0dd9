"""``deltawire live secret``: the secret that pseudonyms, arms and receipts follow from."""

from __future__ import annotations

import argparse
import json

from deltawire.cli.arguments import (
    add_json,
    add_key,
    add_run_url,
    add_secret,
    add_trust,
    seconds,
    trust_of,
)

_VERBS = {
    "create": "make the secret of a deployment, once",
    "adopt": "add the key of a gateway of an earlier release, so that its users stay known",
    "rotate": "add a generation, and use it once all gateways that run hold it",
    "show": "print where the secret is, and its fingerprints",
}


def add_secret_actions(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the action and its verbs."""
    parser = actions.add_parser(
        "secret", help="the deployment's secret: create, adopt, rotate, show"
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name, help_text in _VERBS.items():
        verb = verbs.add_parser(name, help=help_text)
        verb.set_defaults(call=run, verb=name)
        add_run_url(verb)
        add_secret(verb)
        if name in ("create", "adopt"):
            verb.add_argument(
                "--gateway-key",
                action="append",
                default=[],
                required=name == "adopt",
                metavar="FILE",
                help="the private key that an earlier gateway used: the deployment's, or "
                "gateway.key of its state folder; may be repeated",
            )
        if name == "rotate":
            verb.add_argument(
                "--wait",
                type=seconds,
                default=30.0,
                metavar="S",
                help="for gateways to hold the new generation; 0 only adds it (default: 30)",
            )
        add_key(verb)
        add_trust(verb)
        add_json(verb)


def run(arguments: argparse.Namespace) -> int:
    """Does one verb, and prints the fingerprints."""
    from deltawire.launch.live_secret import SecretOptions, do_with_secret

    place, secret = do_with_secret(
        arguments.run,
        arguments.verb,
        SecretOptions(
            trust=trust_of(arguments),
            key=arguments.key,
            secret=arguments.secret,
            gateway_keys=getattr(arguments, "gateway_key", ()),
            wait_s=getattr(arguments, "wait", 0.0),
        ),
    )
    rows = [
        {
            "number": number,
            "fingerprint": one.fingerprint,
            "adopted": one.adopted,
            "used": number == secret.current_number,
        }
        for number, one in secret.numbered.items()
    ]
    if arguments.json:
        print(json.dumps({"place": str(place), "generations": rows}))  # noqa: T201
        return 0
    print(f"the secret is in {place}; keep a copy: without it no user can be found")  # noqa: T201
    for row in rows:
        word = "adopted" if row["adopted"] else "in use" if row["used"] else "earlier"
        print(f"generation {row['number']}: {row['fingerprint']}, {word}")  # noqa: T201
    return 0
