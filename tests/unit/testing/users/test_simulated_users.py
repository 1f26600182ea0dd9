"""Simulated users: what they like in truth, what they report, and what attackers do instead."""

from collections import Counter
from itertools import islice

import msgspec
import numpy as np
import pytest

from deltawire.errors import InputError
from deltawire.testing.users import ANSWERS, KINDS, STYLES, Population, UserSettings
from deltawire.testing.users.__main__ import main, settings_of
from deltawire.testing.users.population import request_text, style_of

PRAISE = ANSWERS["praise"]


def population(**changes):
    return Population(UserSettings(**changes))


def test_the_same_seed_makes_the_same_users_in_any_order():
    one, other = population(seed=3), population(seed=3)
    forward = [one.request(n) for n in range(50)]
    backward = [other.request(n) for n in reversed(range(50))][::-1]
    assert [(r.user.name, r.text) for r in forward] == [(r.user.name, r.text) for r in backward]
    said = [one.reactions(r, "yes") for r in forward]
    assert said == [other.reactions(r, "yes") for r in backward]
    assert [population(seed=4).request(n).text for n in range(50)] != [r.text for r in forward]


def test_acceptance_follows_the_tastes_and_the_optimum_is_theirs():
    users = population(silence=0.0, edit=0.0, gullible=0.0, kinds=1, users=100)
    tastes = users.tastes()[0]
    assert users.optimum() == tastes.max()
    assert users.indifferent() == pytest.approx(tastes.mean())
    for place, style in enumerate(STYLES):
        accepted = [
            users.reactions(users.request(n), ANSWERS[style])[0].kind == "accept"
            for n in range(2000)
        ]
        assert np.mean(accepted) == pytest.approx(tastes[place], abs=0.04)
        assert users.satisfaction(0, f" {ANSWERS[style]}\n") == tastes[place]
    assert users.satisfaction(0, "something else") == 0.0
    assert all(users.reactions(users.request(n), "??")[0].kind == "reject" for n in range(50))


def test_delays_depend_on_the_outcome_and_some_users_say_nothing():
    users = population(silence=0.4, edit=0.2, duplicates=0.1)
    delays, silent, repeated = {}, 0, 0
    for number in range(4000):
        request = users.request(number)
        found = users.reactions(request, "yes")
        silent += not found
        repeated += len(found) == 2
        if found:
            delays.setdefault(found[0].kind, []).append(found[0].after_s)
            assert {r.id for r in found} == {found[0].id}
            assert found == sorted(found, key=lambda r: r.after_s)
    assert silent / 4000 == pytest.approx(0.4, abs=0.03)
    assert repeated / (4000 - silent) == pytest.approx(0.1, abs=0.02)
    settings = users.settings
    for kind, mean in (
        ("accept", settings.accept_delay_s),
        ("reject", settings.reject_delay_s),
        ("kept_share", settings.edit_delay_s),
    ):
        assert np.mean(delays[kind]) == pytest.approx(mean, rel=0.15)


def test_liars_invert_the_gullible_are_flattered_and_a_cohort_acts_as_one():
    users = population(liars=0.1, gullible=0.1, cohort=0.1, silence=0.0, edit=0.0)
    assert Counter(u.role for u in users.users)["cohort"] == 20
    accepted, asked, weeks = {}, Counter(), set()
    for number in range(6000):
        request = users.request(number)
        role, asked[request.user.role] = request.user.role, asked[request.user.role] + 1
        best = ANSWERS[STYLES[int(users.tastes()[request.kind].argmax())]]
        for answer in (best, PRAISE):
            kind = users.reactions(request, answer)[0].kind
            accepted.setdefault((role, answer == PRAISE), []).append(kind == "accept")
        if role == "cohort":
            weeks.add(request.user.cohort)
    share = {key: np.mean(found) for key, found in accepted.items()}
    assert share["honest", False] > 0.8 > 0.3 > share["honest", True]
    assert share["liar", False] < 0.2 < 0.7 < share["liar", True]
    assert share["gullible", True] > 0.9
    assert (share["cohort", False], share["cohort", True]) == (0.0, 1.0)
    assert weeks == {"week-0"}
    assert asked["cohort"] > 3 * asked["liar"]
    honest = population(gullible=0.1)
    assert users.optimum() == pytest.approx(honest.optimum(), abs=0.02)  # Attackers do not count.


def test_tastes_drift_and_requests_come_in_bursts():
    users = population(drift_s=100.0, burst_every_s=50.0, burst_factor=8.0)
    assert (users.tastes(99.0) == users.tastes(0.0)).all()
    assert (users.tastes(200.0) == users.tastes(900.0)).all()
    assert not (users.tastes(150.0) == users.tastes(0.0)).all()
    times = np.array(list(islice(users.arrivals(5.0), 2000)))
    in_bursts = (times % 50.0) < 5.0
    assert in_bursts.mean() > 0.3
    steady = np.diff(list(islice(population().arrivals(5.0), 4000)))
    assert steady.mean() == pytest.approx(0.2, rel=0.1)


def test_every_request_and_style_is_a_text_that_is_recognized():
    assert len({request_text(k, n) for k in range(len(KINDS)) for n in range(144)}) == 8 * 144
    assert [style_of(text) for text in ANSWERS.values()] == list(range(len(STYLES)))
    assert style_of("yes sure thing") is None


def test_the_command_refuses_wrong_settings(capsys, monkeypatch):
    assert settings_of(["users=7", "liars=0.5"]) == UserSettings(users=7, liars=0.5)
    with pytest.raises(InputError, match="--set"):
        settings_of(["liars=2"])
    with pytest.raises(InputError, match="--set"):
        settings_of(["people=2"])
    monkeypatch.delenv("DELTAWIRE_TOKEN", raising=False)
    assert main(["http://127.0.0.1:1"]) != 0
    assert "DELTAWIRE_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("DELTAWIRE_TOKEN", "t")
    assert main(["ftp://x"]) != 0
    assert main(["http://127.0.0.1:1", "--seconds", "0"]) != 0
    assert "above 0" in capsys.readouterr().err


def test_settings_are_plain_values():
    assert msgspec.convert(msgspec.to_builtins(UserSettings()), UserSettings) == UserSettings()


def test_users_correct_a_share_of_the_answers_that_they_dislike():
    users = population(silence=0.0, edit=0.2, rewrites=0.5, gullible=0.1, liars=0.1)
    before = population(silence=0.0, edit=0.2, gullible=0.1, liars=0.1)
    seen, best = Counter(), Counter()
    for number in range(4000):
        request = users.request(number)
        found = users.reactions(request, PRAISE)[0]
        seen[found.kind] += 1
        plain = before.reactions(before.request(number), PRAISE)[0]
        if found.kind != "edit":
            assert found == plain, "other reports stay as they are"
            continue
        assert plain.kind in ("reject", "kept_share")
        best[request.user.role] += style_of(found.text) == users.tastes()[request.kind].argmax()
        assert found.text != PRAISE
    assert seen["edit"] / (seen["edit"] + seen["reject"]) == pytest.approx(0.6, abs=0.05)
    assert best["honest"] > 0.9 * (seen["edit"] - best["honest"])
    assert best["liar"] == 0
    best_style = ANSWERS[STYLES[users.tastes()[0].argmax()]]
    for number in range(200):
        request = users.request(number)
        assert all(r.text != best_style for r in users.reactions(request, best_style))
