"""Coverage: whether a secret finds a user in what every gateway of a bucket stored.

A pseudonym is found by the generation of the secret that made it. A gateway's state names the
generations that it held, or, of an earlier release, the public key that its pseudonyms came from.
"""

from __future__ import annotations

from collections.abc import Container

from deltawire.errors import CorruptError, InputError
from deltawire.live.deployment_secret import DeploymentSecret
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import listed_twice
from deltawire.wire import keys
from deltawire.wire.captures import MAX_GATEWAY_BYTES, GatewayState
from deltawire.wire.objects import decode_json


def uncovered_gateways(bucket: Bucket, secret: DeploymentSecret) -> dict[str, str]:
    """Returns the gateways that may have stored users under pseudonyms which ``secret`` cannot
    compute, each with the reason."""
    found: dict[str, str] = {}
    stated = set()
    for key in listed_twice(bucket, keys.LIVE_GATEWAYS):
        name = key.removeprefix(keys.LIVE_GATEWAYS).removesuffix(".json")
        stated.add(name)
        try:
            data = bucket.get(key, limit=MAX_GATEWAY_BYTES)
            state = None if data is None else decode_json(data, GatewayState, run="", key=key)
        except CorruptError:
            # Counted as not covered: the erasure names the gateway and is not reported as done.
            found[name] = "its state cannot be read"
            continue
        if state is not None and (reason := _uncovered(state, secret)):
            found[name] = reason
    for stream in ("captures", "feedback"):
        places = [f"{base}{stream}/" for base in (keys.LIVE, keys.LIVE_COMPACTED, keys.LIVE_INDEX)]
        for prefix in places:
            for name in bucket.list_prefixes(prefix):
                if name not in stated and bucket.list(f"{prefix}{name}/"):
                    found[name] = "the bucket does not say which secret it had"
    return found


def require_coverage(
    bucket: Bucket, secret: DeploymentSecret, *, without: Container[str] = ()
) -> None:
    """Raises `InputError` if a gateway is not covered, except those that the operator names
    (``without``)."""
    missing = {
        name: reason
        for name, reason in uncovered_gateways(bucket, secret).items()
        if name not in without
    }
    if missing:
        listed = "; ".join(f"{name}: {reason}" for name, reason in sorted(missing.items())[:8])
        raise InputError(
            f"nothing was done: the user may be in what {len(missing)} gateways stored under "
            f"pseudonyms of another key ({listed})",
            hint="adopt the private key of each (deltawire live secret adopt --help); to leave out "
            "a gateway whose key is lost, give --without-gateway NAME",
            run=bucket.url,
        )


def _uncovered(state: GatewayState, secret: DeploymentSecret) -> str:
    if state.generations:
        unknown = [one for one in state.generations if one not in secret.held]
        return f"it held generation {unknown[0]}" if unknown else ""
    if state.public_key in secret.receipt_keys.signing:
        return ""
    return f"its key was {state.public_key or 'not stated'}"
