"""The simulation of a fleet: its shared rates, and its agreement with the closed form."""

import json
import random

import pytest
from planned_fleets import RATES, write_plan

from deltawire.cli.main import main
from deltawire.plan.fleet.description import describe_fleet
from deltawire.plan.fleet.planner import make_plan
from deltawire.plan.fleet.request import read_request
from deltawire.plan.fleet.simulation.fleet import simulate_fleet
from deltawire.plan.fleet.simulation.shared_rate import SharedRate
from deltawire.plan.fleet.simulation.transfers import simulate_transfer
from deltawire.plan.fleet.transfer import follow, publish

simpy = pytest.importorskip("simpy")


def ends(capacity, each, uses):
    """When uses end that begin at given times: (start, amount) each."""
    env = simpy.Environment()
    shared = SharedRate(env, capacity, each)
    found = {}

    def one(number, start, amount):
        yield env.timeout(start)
        yield shared.use(amount)
        found[number] = env.now

    for number, (start, amount) in enumerate(uses):
        env.process(one(number, start, amount))
    env.run()
    return [found[number] for number in range(len(uses))]


def test_a_rate_is_divided_equally():
    assert ends(10, 10, [(0, 10)]) == [1]
    assert ends(10, 10, [(0, 10), (0, 10)]) == [2, 2]
    assert ends(10, 4, [(0, 10)]) == [2.5]
    # The second begins when the first is half done; they share until the first ends.
    assert ends(10, 10, [(0, 10), (0.5, 10)]) == pytest.approx([1.5, 2.0])
    assert ends(10, 10, [(0, 10), (0.5, 0)]) == pytest.approx([1.0, 0.5])
    assert ends(float("inf"), float("inf"), [(1, 99)]) == [1]


def test_shared_rates_equal_a_slow_simulation():
    """The same ends as dividing the capacity in small steps of time."""
    rng = random.Random(3)
    uses = [(rng.random() * 3, 0.2 + rng.random() * 3) for _ in range(12)]
    left, clock, step, slow = dict(enumerate(a for _, a in uses)), 0.0, 1e-4, {}
    while left:
        active = [n for n in left if uses[n][0] <= clock]
        for number in active:
            left[number] -= step * min(1.0, 2.0 / len(active))
            if left[number] <= 0:
                slow[number] = clock + step
                del left[number]
        clock += step
    assert ends(2.0, 1.0, uses) == pytest.approx([slow[n] for n in range(12)], abs=0.01)


def test_the_simulation_agrees_with_the_closed_form(tmp_path):
    """Within 15 % for one transfer, and for a region's last reader over a whole fleet."""
    request = read_request(write_plan(tmp_path))
    model = request.architecture()
    described = describe_fleet(request, model, RATES, changed=0.003)
    readers = described.readers["home"]
    closed = publish(described.amounts, described.writer).seconds
    closed += follow(described.amounts, readers).seconds
    found = simulate_transfer(described.amounts, described.writer, readers, seeds=10)
    assert found == pytest.approx(closed, rel=0.15)
    plan = make_plan(request, model, RATES, changed=0.003)
    simulated = simulate_fleet(request, described, steps=9, seed=0)
    for region in plan.regions:
        assert simulated.mean_reader_s[region.name] == pytest.approx(region.seconds, rel=0.15)
    assert simulated.staleness_max <= 4
    assert simulated == simulate_fleet(request, described, steps=9, seed=0)


def test_the_command_prints_both(tmp_path, capsys):
    path = write_plan(tmp_path)
    assert main(["plan", str(path), "--simulate", "3"]) == 0
    printed = capsys.readouterr().out
    assert "closed form" in printed
    assert "granted" in printed
    assert main(["plan", str(path), "--simulate", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"]["steps"] == 3
    assert found["plan"]["name"] == "small"
