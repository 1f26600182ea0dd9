"""The verdicts on endpoints of which only log-probabilities are seen."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from benchmarks.attest.cached_endpoint import VOCABULARY, CachedEndpoint, Recurrent
from deltawire.cli.main import main
from deltawire.display import safe_json
from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.launch.black_box import checking
from deltawire.launch.black_box.endpoint import HttpEndpoint
from deltawire.launch.black_box.judging import (
    ROUNDS,
    EndpointTests,
    TwoSided,
    check_endpoint,
    fit_payoff,
    nearer_payoff,
)

BASE = Recurrent(0)


def looked(endpoint, versions, *, count=96, error=0.01, seed=0, cached=None):
    rng = np.random.default_rng(seed)
    return check_endpoint(
        endpoint,
        [weights.version(name) for name, weights in versions.items()],
        rng.integers(0, VOCABULARY, (96, 16)).tolist()[:count],
        name="the endpoint",
        fresh=iter(rng.integers(0, VOCABULARY, count).tolist()),
        vocabulary=VOCABULARY,
        error=error,
        cached=cached,
    )


@pytest.mark.parametrize("size", [0.003, 0.1])
def test_the_version_that_is_served_is_the_same_and_its_neighbour_is_named(size):
    before = BASE.stepped(1, size)
    serving = CachedEndpoint(BASE, clears=True)
    report = looked(serving, {"version 4": BASE, "version 3": before})
    assert (report.verdict, report.fits, report.cause) == ("same", "version 4", "")
    report = looked(serving, {"version 3": before, "version 4": BASE})
    assert (report.verdict, report.fits, report.cause) == ("different", "version 4", "version")
    assert report.gaps["version 4"] == pytest.approx(report.noise, rel=0.7)
    assert json.loads(safe_json(report))["gaps"] == report.gaps, "as --json prints it"


def test_a_change_within_the_noise_is_not_told_apart_without_the_other_version():
    almost = CachedEndpoint(BASE.stepped(1, 0.0005), clears=True)
    assert looked(almost, {"version 4": BASE}).verdict == "same"
    far = CachedEndpoint(BASE.stepped(1, 0.1), clears=True)
    report = looked(far, {"version 4": BASE})
    assert (report.verdict, report.fits, report.cause) == ("different", "", "")


def test_few_sequences_decide_nothing():
    report = looked(CachedEndpoint(BASE, clears=True), {"version 4": BASE}, count=3)
    assert (report.verdict, report.sequences, report.tokens) == ("cannot tell", 3, 45)


def test_two_versions_with_the_same_scores_are_never_told_apart():
    report = looked(CachedEndpoint(BASE, clears=True), {"version 4": BASE, "a copy": BASE})
    assert (report.verdict, report.fits) == ("cannot tell", "")


def test_an_endpoint_that_does_not_say_its_tokens_says_so():
    silent = CachedEndpoint(BASE, clears=True, says_tokens=False)
    report = looked(silent, {"version 4": BASE})
    assert report.verdict == "same"
    assert "no cache was examined" in report.notes[0]


class Counting(CachedEndpoint):
    """Counts requests, and may stop to say its tokens after ``says`` of them."""

    def __init__(self, *args, says=1000, **kind):
        super().__init__(*args, **kind)
        self.says, self.asked, self.forced_count = says, [], 0

    def forced(self, tokens):
        self.forced_count += 1
        return super().forced(tokens)

    def drawn(self, prompt, count):
        self.asked.append(tuple(prompt))
        return super().drawn(prompt, count) if len(self.asked) <= self.says else None


SMALL = 0.012
"""A step whose stale answers are off by about three times the noise."""


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("cached", [8, 24])
def test_a_small_step_s_stale_cache_is_found_after_the_prompts_that_are_in_it(stale, cached):
    for seed in range(3):
        endpoint = Counting(BASE.stepped(1, SMALL), clears=not stale)
        looked(endpoint, {"version 3": endpoint.weights}, count=cached, seed=seed)
        endpoint.update(BASE)
        prompts = set(endpoint._cache) if stale else set(endpoint.asked[:cached])
        endpoint.asked, endpoint.forced_count = [], 0
        report = looked(endpoint, {"version 4": BASE}, seed=seed, cached=cached)
        if cached < 24 and report.notes:
            assert "not certain" in report.notes[0], "three draws after each of few prompts"
            assert not report.cause
        else:
            assert report.cause == ("prefix cache" if stale else ""), report
            assert report.notes == []
        assert set(endpoint.asked) <= prompts
        assert endpoint.forced_count <= 40, "the weights are decided by then"
        assert len(endpoint.asked) <= 3 * cached


def test_a_watch_remembers_after_which_prompts_its_first_look_drew(monkeypatch):
    endpoint, given = CachedEndpoint(BASE, clears=True), []

    def check(*_, cached, **__):
        given.append(cached)
        return looked(endpoint, {"version 4": BASE}, count=16 + 8 * len(given))

    monkeypatch.setattr(checking, "check_endpoint", check)
    monkeypatch.setattr(checking, "HttpEndpoint", lambda *_, **__: endpoint)
    monkeypatch.setattr(checking.BlackBox, "_resolved", lambda _, text: text)
    monkeypatch.setattr(checking.BlackBox, "_open", lambda *_, **__: None)
    box = checking.BlackBox(checking.BlackBoxOptions(url="u", against="a"), None)
    first = box.check()
    box.check(), box.check()
    assert given == [None, first.sequences, first.sequences]


def test_an_endpoint_that_stops_returning_token_ids_is_not_asked_again():
    endpoint = Counting(BASE.stepped(1, 0.1), clears=False)
    looked(endpoint, {"version 3": endpoint.weights}, count=24)
    endpoint.update(BASE)
    endpoint.asked, endpoint.forced_count, endpoint.says = [], 0, 3
    report = looked(endpoint, {"version 4": BASE}, cached=24)
    assert (report.verdict, len(endpoint.asked)) == ("same", 4)
    assert endpoint.forced_count <= 40
    assert "no cache was examined" in report.notes[0]


def test_the_same_weights_say_if_the_cache_is_undecided():
    class Divided(CachedEndpoint):
        """Cached prompts fit and do not in turn."""

        def drawn(self, prompt, count):
            tokens, given = super().drawn(prompt, count)
            self.asked = getattr(self, "asked", 0) + 1
            return tokens, given - (self.asked % 2) * 0.5

    endpoint = Divided(BASE, clears=True)
    report = looked(endpoint, {"version 4": BASE}, count=32)
    assert (report.verdict, report.cause, endpoint.asked) == ("same", "", 32)
    assert "after cached prompts" in report.notes[0]
    assert looked(CachedEndpoint(BASE, clears=True), {"version 4": BASE}).notes == []


@pytest.mark.parametrize("tokens", [[VOCABULARY], [-1], [10**9], [0] * 17])
def test_tokens_that_were_not_asked_for_are_refused(tokens):
    endpoint = CachedEndpoint(BASE, clears=True)
    endpoint.drawn = lambda prompt, count: (tokens, np.zeros(len(tokens)))
    with pytest.raises(CorruptError, match="asked for 16 tokens below 40"):
        looked(endpoint, {"version 4": BASE})


@pytest.mark.parametrize("url", ["some/folder", "file:///etc", "ftp://127.0.0.1"])
def test_only_addresses_of_servers_are_opened(url):
    with pytest.raises(InputError, match="no address of a server"):
        HttpEndpoint(url)


@pytest.mark.parametrize("option", ["error", "model", "prompts"])
def test_options_of_the_black_box_need_it(option, capsys):
    assert main(["attest", "a", "--against", "b", f"--{option}", "0.5"]) == 2
    assert f"--{option} needs --black-box" in capsys.readouterr().err


def test_a_folder_that_is_no_model_is_named(tmp_path, capsys):
    (tmp_path / "model.safetensors").touch()
    code = main(["attest", "http://127.0.0.1:1", "--against", str(tmp_path), "--black-box"])
    assert code == 2
    assert "has no config.json; scores need a model directory" in capsys.readouterr().err


def test_the_error_rate_is_divided_among_the_tests():
    """Looks 100 times at pure chance: 5 wrong decisions are expected at most."""
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(100):
        test = TwoSided()
        for payoff in rng.choice([-1.0, 1.0], 60):
            test.add(payoff)
            if test.decided(0.05 / 2):
                wrong += 1
                break
    assert wrong <= 9  # More than 9 has a probability of 3 %.
    one, three = EndpointTests(["a"], error=0.06), EndpointTests(["a", "b", "c"], error=0.06)
    assert one._error * 4 == pytest.approx(three._error * 10) == pytest.approx(0.06)


def test_payoffs_have_the_signs_that_they_state():
    noise = np.full(8, 0.01)
    first, second = np.zeros(8), np.full(8, 0.02)
    assert (
        nearer_payoff(first, first, second, noise) < 0 < nearer_payoff(second, first, second, noise)
    )
    assert nearer_payoff(second, first, first, noise) == 0
    assert fit_payoff(noise, noise) == pytest.approx(-1 / 3)
    assert fit_payoff(4 * noise, noise) == pytest.approx(1 / 3)
    assert fit_payoff(0 * noise, 0 * noise) == 0


@pytest.fixture
def server():
    """A completions endpoint over `CachedEndpoint`; ``answers`` replaces its answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(200, {"data": [{"id": "policy"}]})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.asked.append(asked)
            if self.server.answers:
                return self.reply(*self.server.answers.pop(0))
            endpoint, prompt = self.server.endpoint, asked["prompt"]
            if asked.get("echo"):
                given = [None, *endpoint.forced(prompt).tolist(), -1.0]
                choice = {"logprobs": {"token_logprobs": given}}
            else:
                tokens, given = endpoint.drawn(prompt, asked["max_tokens"])
                choice = {"logprobs": {"token_logprobs": given.tolist()}, "token_ids": tokens}
            return self.reply(200, {"choices": [choice]})

        def reply(self, status, body):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.asked, server.answers = [], []
    server.endpoint = CachedEndpoint(BASE, clears=True)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_is_asked_over_http(server):
    endpoint = HttpEndpoint(server.url + "/", token="secret")
    assert endpoint.model == "policy"
    report = looked(endpoint, {"version 4": BASE})
    assert report.verdict == "same"
    neutral = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    assert all(asked.items() >= neutral.items() for asked in server.asked)
    forced = [asked for asked in server.asked if asked.get("echo")]
    drawn = [asked for asked in server.asked if not asked.get("echo")]
    assert {asked["model"] for asked in server.asked} == {"policy"}
    # Fixed sequences: what is forced has a fresh first token, what is drawn after is as given.
    assert [asked["prompt"][1:] for asked in forced] == [asked["prompt"][1:] for asked in drawn]
    assert [asked["prompt"] for asked in forced] != [asked["prompt"] for asked in drawn]


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        ((404, {}), InputError, "answers 404"),
        ((503, {}), RetryError, "refuses for the moment"),
        ((200, {"choices": []}), CorruptError, "cannot be read"),
        ((200, {"choices": [{}]}), InputError, "0 log-probabilities for 3 tokens"),
        ((401, {}), InputError, r"answers 401(?!.*echo)"),
        *(
            (
                (200, {"choices": [{"logprobs": {"token_logprobs": [None, value, -1.0]}}]}),
                CorruptError,
                "that are none",
            )
            for value in (1e308, -1e308, 0.01)
        ),
        (
            (200, {"choices": [{"logprobs": {"token_logprobs": [None, None, -1.0]}}]}),
            CorruptError,
            "that are none",
        ),
    ],
)
def test_an_endpoint_without_log_probabilities_gets_one_clear_error(server, answer, kind, text):
    server.answers = [answer]
    with pytest.raises(kind, match=text):
        HttpEndpoint(server.url).forced([1, 2, 3])


@pytest.mark.drills
@pytest.mark.parametrize(("prompts", "deviation"), [(4, 0.25), (8, 0.25), (16, 0.25), (24, 0.15)])
def test_the_same_answers_again_do_not_exceed_the_error(prompts, deviation):
    """Payoffs with a mean at the limit, which an endpoint repeats in each round."""
    rng, wrong, looks = np.random.default_rng(0), 0, 4000
    for _ in range(looks):
        payoffs = np.clip(rng.normal(0.0, deviation, prompts), -1.0, 1.0)
        test = TwoSided()
        for draw in range(min(ROUNDS * prompts, 96)):
            test.add(float(payoffs[draw % prompts]))
            if test.decided(0.0025):
                break
        wrong += test.decided(0.0025) > 0
    assert wrong <= 0.0025 * looks
