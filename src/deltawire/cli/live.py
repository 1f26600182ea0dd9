"""``deltawire live``: which version serves users, who decided it, and whose data is stored."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from deltawire.cli.arguments import (
    add_json,
    add_key,
    add_run_url,
    add_trust,
    fraction,
    seconds,
    split_version,
    trust_of,
)
from deltawire.cli.live_compact import add_compact_action
from deltawire.cli.live_secret import add_secret_actions
from deltawire.cli.live_users import add_user_actions
from deltawire.display import safe_line

if TYPE_CHECKING:
    from deltawire.wire.operator_state import Mode

_ACTIONS = {
    "status": "what serves, and the candidate's tests",
    "plan": "answers that each stage needs",
    "decide": "follow the tests, until stopped",
    "promote": "by hand: let a version serve all users",
    "hold": "by hand: return users to the serving version until a person decides",
    "rollback": "by hand: take the candidate back, or serve an earlier version",
    "canary": "by hand: show a version to a share of users; the tests go on",
    "pause": "by hand: begin no canary; one that is under way is judged",
    "freeze": "by hand: decide nothing but by hand",
    "resume": "by hand: end pause or freeze",
}
_MODES = {"pause": "paused", "freeze": "frozen", "resume": "running"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "live",
        help="decide which version serves users; the deployment's secret; a user's data",
        description="Exit code of status and decide --once: 0 nothing is open, 10 undecided, 11 "
        "held, 12 the last candidate was rolled back.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for name, help_text in _ACTIONS.items():
        action = actions.add_parser(name, help=help_text)
        action.set_defaults(call=run, action=name)
        _add_decision_options(action)
        if name == "decide":
            _add_gate_options(action)
            _add_webhook_options(action)
        if name == "promote":
            action.add_argument(
                "--again", action="store_true", help="also if the version was rolled back"
            )
        if name == "canary":
            action.add_argument(
                "--share", type=fraction, required=True, metavar="SHARE", help="of all users"
            )
    add_user_actions(actions)
    add_secret_actions(actions)
    add_compact_action(actions)


def _add_decision_options(parser: argparse.ArgumentParser) -> None:
    add_run_url(parser)
    parser.add_argument(
        "--version",
        type=int,
        default=None,
        metavar="N",
        help="promote this version, or roll back to it (default: the candidate's, or the previous)",
    )
    parser.add_argument(
        "--upstream",
        default="",
        metavar="NAME",
        help="in place of a version: another provider's model, as gateways name it",
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="recorded with the decision")
    parser.add_argument(
        "--by", default="", metavar="NAME", help="who decides (default: the user's login)"
    )
    parser.add_argument("--once", action="store_true", help="decide what follows now, then stop")
    parser.add_argument(
        "--effect",
        type=fraction,
        default=0.05,
        metavar="SHARE",
        help="plan for a candidate better by this (default: 0.05)",
    )
    parser.add_argument(
        "--rate",
        type=fraction,
        default=0.5,
        metavar="SHARE",
        help="plan for this mean outcome of the serving version (default: 0.5)",
    )
    add_key(parser)
    add_trust(parser)
    add_json(parser)


def _add_gate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gate",
        default="",
        metavar="COMMAND|URL|none",
        help="what scores versions in place of the run's evaluator; needed for a run without a "
        "configuration",
    )
    parser.add_argument(
        "--gate-margin",
        type=fraction,
        default=0.02,
        metavar="SHARE",
        help="how much lower a candidate's mean score may be (default: 0.02)",
    )
    parser.add_argument(
        "--gate-timeout",
        type=seconds,
        default=3600.0,
        metavar="S",
        help="the longest time for one version (default: 3600)",
    )


def _add_webhook_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--webhook", default="", metavar="URL", help="post each decision there, also people's"
    )
    parser.add_argument(
        "--webhook-secret-file",
        default="",
        metavar="FILE",
        help="sign what is posted with this secret",
    )


def run(arguments: argparse.Namespace) -> int:
    """Does one action."""
    import time

    from deltawire.launch.live import (
        ReleaseOptions,
        decide_until_stopped,
        exit_code,
        line_of,
        open_releaser,
        plan_of,
        state_of,
        take_decision,
    )
    from deltawire.launch.live_operator import begin_canary, set_mode

    if arguments.action in ("promote", "rollback", "canary"):
        split_version(arguments)
    options = ReleaseOptions(
        trust=trust_of(arguments),
        key=arguments.key,
        version=arguments.version,
        upstream=arguments.upstream,
        reason=arguments.reason,
        by=arguments.by,
    )
    action = arguments.action
    if action == "decide":
        options = replace(
            options,
            gate=arguments.gate,
            gate_margin=arguments.gate_margin,
            gate_timeout_s=arguments.gate_timeout,
            webhook=arguments.webhook,
            webhook_secret_file=arguments.webhook_secret_file,
        )
    if action == "decide":
        state = decide_until_stopped(
            arguments.run,
            options,
            once=arguments.once,
            report=lambda one: None if arguments.json else print(line_of(one), flush=True),  # noqa: T201
        )
        _show(state, as_json=arguments.json)
        return exit_code(state)
    if action == "canary":
        _show(begin_canary(arguments.run, arguments.share, options), as_json=arguments.json)
        return 0
    if action in _MODES:
        state = set_mode(arguments.run, cast("Mode", _MODES[action]), options)
        _show(state, as_json=arguments.json)
        return 0
    if action in ("promote", "hold", "rollback"):
        options = replace(options, again=getattr(arguments, "again", False))
        _show(take_decision(arguments.run, action, options), as_json=arguments.json)
        return 0
    releaser = open_releaser(arguments.run, options, writes=False)
    if action == "plan":
        plan = plan_of(releaser, effect=arguments.effect, rate=arguments.rate)
        _show_plan(plan, as_json=arguments.json)
        return 0
    state = state_of(releaser, time.time())
    if not arguments.json:
        for decision in releaser.log.decisions:
            print(line_of(decision))  # noqa: T201
    _show(state, as_json=arguments.json)
    return exit_code(state)


def _show_plan(plan: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(plan))  # noqa: T201
        return
    if plan["shadow"]:
        print(f"shadow: {plan['shadow']} copies of requests, unseen by users")  # noqa: T201
    for stage in plan["stages"]:
        print(f"share {stage['share']:g}: {stage['outcomes']} outcomes")  # noqa: T201


def _show_tests(tests: dict[str, Any]) -> None:
    for name, one in tests.items():
        print(  # noqa: T201
            f"  {name}: difference {one['difference']:+.4f}, evidence {one['log_evidence']:.2f} of "
            f"{one['log_threshold']:.2f}"
        )


def _estimated(found: dict[str, Any], live: dict[str, float] | None) -> str:
    """Returns an off-policy estimate next to what users showed, as one line."""
    if found["snips"] is None:
        return f"no estimate from logged answers: {found['refused']}"
    words = (
        f"estimate from {found['answers']} logged answers (effective: {found['effective']:.1f}): "
        f"SNIPS {found['snips']:.3f} ± {found['snips_error']:.3f}, doubly robust "
        f"{found['doubly_robust']:.3f} ± {found['doubly_robust_error']:.3f}, "
        f"logged {found['logged']:.3f}"
    )
    if found["low"] is not None:  # Evaluations of earlier releases have no interval.
        words += f"; 95 % interval {found['low']:.3f} to {found['high']:.3f}"
        words += f", clipped {found['clipped_mass']:.1%}"
    if live is not None:
        words += f"; measured: candidate {live['candidate']:.3f}, serving {live['serving']:.3f}"
    return words


def _lineage(found: dict[str, Any]) -> str:
    """Returns what promotions have added up to since a person chose a version, as one line."""
    words = (
        f"{found['promotions']} promotions since version {found['first']} by margins of "
        f"{found['spent']:.3g} together, {found['measured_worse']} of them measured worse "
        f"({found['change']:+.3f} in all)"
    )
    if found["bound"] is None:
        return f"{words}; nothing bounds the sum (live.release.creep)"
    return f"{words}, of {found['bound']:g} at most; the next margin is {found['margin']:.3g}"


def _hold_back(found: dict[str, Any] | None) -> list[str]:
    """Returns what promotions add up to against the hold-back version, as lines."""
    if found is None:
        return []
    held = f"upstream {found['upstream']}" if found["upstream"] else f"version {found['version']}"
    name = f"hold-back {held}, kept by {found['share']:.1%} of users"
    if found["returned"]:
        return [f"alarm: all users returned to {name}: versions since added up to a loss"]
    seen = found["comparison"]
    if seen is None:
        return [f"{name}: no other version serves"]
    if not seen["users"]["hold_back"]:
        return [f"{name}: none of them has settled; each gateway needs three replicas"]
    line = (
        f"{name}: the serving version is {seen['difference']:+.3f} against it "
        f"({seen['low']:+.3f} to {seen['high']:+.3f}, {seen['users']['hold_back']} users of it)"
    )
    lines = [line]
    if seen["worse"]:
        lines.append(f"alarm: versions since are worse: {', '.join(seen['worse'])}")
    return lines


def _named(served: dict[str, Any]) -> str:
    """Returns what serves: a version, or another provider's model."""
    if served["upstream"]:
        return f"upstream {served['upstream']} (nothing attests its weights)"
    return f"version {served['version']}"


def _show(state: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(state))  # noqa: T201
        return
    serving, candidate = state["serving"], state["candidate"]
    print(  # noqa: T201
        f"{state['state']}: "
        + (f"{_named(serving)} serves" if serving else "no version serves by decision")
        + (
            f", candidate {_named(candidate).removeprefix('version ')} at {state['share']:g}"
            if candidate
            else ""
        )
    )
    operator = state["operator"]
    if operator["mode"] != "running":
        by = f" by {operator['by']}" if operator["by"] else ""
        print(safe_line(f"  {operator['mode']}{by}: {operator['reason']}"))  # noqa: T201
    if serving is not None:
        print(f"  {_lineage(state['lineage'])}")  # noqa: T201
        for line in _hold_back(state["hold_back"]):
            print(f"  {line}")  # noqa: T201
    for place, counts in state.get("outcomes", {}).items():
        line = f"{counts['candidate']} of the candidate, {counts['serving']} of the serving version"
        print(f"  outcomes at {place}: {line}")  # noqa: T201
    _show_tests(state.get("tests", {}))
    if (shadow := state.get("shadow")) is not None:
        first_s = shadow["first_s"]
        print(  # noqa: T201
            f"  copies compared: {shadow['copies']} of {shadow['wanted']}, dropped "
            f"{shadow['dropped']}; first token after {first_s['candidate']:.3f} s, users' answers "
            f"{first_s['serving']:.3f} s"
        )
        _show_tests(shadow["tests"])
    if (estimate := state.get("estimate")) is not None:
        print(f"  {_estimated(estimate, state.get('live'))}")  # noqa: T201
    if (gap := state.get("heldout_less_live")) is not None:
        print(  # noqa: T201
            f"  held-out accuracy less live metric: candidate {gap['candidate']:+.3f}, "
            f"serving {gap['serving']:+.3f}"
        )
    if state["paused_until"]:
        print(  # noqa: T201
            f"  alarm: the evaluation gate stopped {state['gate_failures']} candidates in a row; "
            f"learning pauses for {max(state['paused_until'] - state['now'], 0):.0f} s more"
        )
    if state.get("warning"):
        print(f"  warning: {state['warning']}")  # noqa: T201
    if state.get("alarm"):
        print(f"  alarm: {state['alarm']}")  # noqa: T201
    for number, fault in state["void"].items():
        print(f"  decision {number} is void: {fault}")  # noqa: T201
