"""Checks arguments against a tool's JSON schema. Runs in a child process with limits.

Schemas come from servers and arguments from a model: a pattern may take forever, and a reference
may name another machine. So this runs in a `deltawire.envs.scoring_process.ScoringProcess`, and
references outside of the schema are refused.
"""

from __future__ import annotations

from typing import Any

from jsonschema import SchemaError
from jsonschema.exceptions import best_match
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry


def check(schema: dict[str, Any], arguments: dict[str, Any] | None) -> float:
    """Returns 0 if the arguments match the schema; without arguments, if the schema is one.

    Raises `ValueError` with the reason, for the model or for the log.
    """
    kind = validator_for(schema, default=Draft202012Validator)
    if arguments is None:
        try:
            kind.check_schema(schema)
        except SchemaError as error:
            raise ValueError(error.message[:300]) from error
        return 0.0
    registry: Registry[Any] = Registry()
    fault = best_match(kind(schema, registry=registry).iter_errors(arguments))
    if fault is not None:
        place = "".join(f"[{step!r}]" for step in fault.absolute_path)
        raise ValueError(f"{f'{place}: ' if place else ''}{fault.message}"[:300])
    return 0.0
