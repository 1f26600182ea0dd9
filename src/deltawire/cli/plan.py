"""``deltawire plan``: how a version reaches a fleet, what binds, and what it costs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from deltawire.cli.arguments import add_json, add_trust, at_least, trust_of

if TYPE_CHECKING:
    from deltawire.plan.architecture import Model
    from deltawire.plan.fleet.planner import FleetPlan
    from deltawire.plan.fleet.rates import Rates
    from deltawire.plan.fleet.request import PlanRequest


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "plan",
        help="plan how versions reach a fleet: time and money of each hop, staleness, memory",
        description="Plans from a PLAN.toml (docs/PLANNING.md); examples are in examples/plans.",
    )
    parser.set_defaults(call=run)
    parser.add_argument("plan", metavar="PLAN.toml", help="model, trainer, rollouts and regions")
    parser.add_argument(
        "--rates",
        default="",
        metavar="FILE.json",
        help="rates that deltawire bench hops --out wrote (default: those shipped)",
    )
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="KEY=VALUE,…",
        help="plan with a key changed to each of the values, such as regions.*.poll_s=0.1,0.5; "
        "given again: all combinations",
    )
    parser.add_argument(
        "--simulate",
        type=at_least(1),
        metavar="STEPS",
        help="also simulate so many steps of the fleet (needs deltawire[plan])",
    )
    parser.add_argument("--seed", type=at_least(0), default=0, help="the seed of the simulation")
    parser.add_argument("--plot", default="", metavar="FILE", help="draw it: .svg, .png, .pdf")
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan, the rows of --what-if, or what was simulated."""
    import msgspec
    from rich.console import Console

    from deltawire.errors import InputError
    from deltawire.plan.fleet.planner import make_plan
    from deltawire.plan.fleet.plot import draw_plan, draw_what_if
    from deltawire.plan.fleet.rates import read_rates, shipped_rates
    from deltawire.plan.fleet.views import plan_view, what_if_view
    from deltawire.plan.fleet.what_if import parse_what_if, plan_what_if

    rates = read_rates(Path(arguments.rates)) if arguments.rates else shipped_rates()
    if arguments.what_if:
        if arguments.simulate:
            raise InputError("--what-if and --simulate are given together: choose one")
        keys = parse_what_if(arguments.what_if)

        def planned(changes: dict[str, str]) -> FleetPlan:
            request, model, changed = _read(arguments, rates, changes)
            return make_plan(request, model, rates, changed=changed)

        rows = plan_what_if(keys, planned)
        if arguments.plot:
            draw_what_if(rows, Path(arguments.plot))
        if arguments.json:
            print(msgspec.json.encode(rows).decode())  # noqa: T201
        else:
            Console().print(what_if_view(rows))
        return 0
    request, model, changed = _read(arguments, rates, {})
    plan = make_plan(request, model, rates, changed=changed)
    if arguments.plot:
        draw_plan(plan, Path(arguments.plot))
    if arguments.simulate:
        return _simulate(arguments, request, model, rates, plan)
    if arguments.json:
        print(msgspec.json.encode(plan).decode())  # noqa: T201
    else:
        Console().print(plan_view(plan))
    return 0


def _read(
    arguments: argparse.Namespace, rates: Rates, changes: dict[str, str]
) -> tuple[PlanRequest, Model, float]:
    """Returns what PLAN.toml asks, its model, and the share of the values that a step changes."""
    from deltawire.plan.fleet.request import read_request
    from deltawire.runtime.trusted import open_trusted

    path, trust = Path(arguments.plan), trust_of(arguments)
    request = read_request(path, changes)
    changed = request.changed(rates, open_run=lambda location: open_trusted(location, trust))
    return request, request.architecture(path.parent), changed


def _simulate(
    arguments: argparse.Namespace, request: PlanRequest, model: Model, rates: Rates, plan: FleetPlan
) -> int:
    """Simulates the plan's fleet, and prints it next to the closed form."""
    import msgspec
    from rich.console import Console

    from deltawire.errors import InputError
    from deltawire.plan.fleet.description import describe_fleet
    from deltawire.plan.fleet.views import simulation_view

    try:
        from deltawire.plan.fleet.simulation.fleet import simulate_fleet
    except ImportError:
        raise InputError("--simulate needs SimPy", hint="pip install 'deltawire[plan]'") from None
    described = describe_fleet(request, model, rates, changed=plan.changed)
    found = simulate_fleet(
        request, described, steps=arguments.simulate, seed=arguments.seed, faults=request.faults
    )
    if arguments.json:
        print(msgspec.json.encode({"plan": plan, "simulated": found}).decode())  # noqa: T201
    else:
        Console().print(simulation_view(plan, found))
    return 0
