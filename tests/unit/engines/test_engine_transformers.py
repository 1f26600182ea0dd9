"""The embedded engine against the model's own ``generate`` and against forwards without a cache."""

import copy
import math

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from deltawire.engines.base import Sampling, Truncation
from deltawire.engines.transformers import TransformersEngine
from deltawire.engines.transformers.cache import cache_argument
from deltawire.errors import InputError

WINDOW = 6

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mistral():
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW))


def gemma2():
    config = Gemma2Config(**SIZES, sliding_window=WINDOW, query_pre_attn_scalar=8)
    assert config.layer_types == ["sliding_attention", "full_attention"]
    return Gemma2ForCausalLM(config)


def qwen3_windowed():
    settings = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    config = Qwen3Config(**SIZES, **settings)
    assert config.layer_types == ["full_attention", "sliding_attention"]
    return Qwen3ForCausalLM(config)


def qwen3_all_windowed():
    settings = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **settings))


def qwen3_eager():
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, attn_implementation="eager"))


def qwen3_moe():
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS))


def gpt_oss():
    config = GptOssConfig(
        **{**SIZES, "intermediate_size": 24},
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return GptOssForCausalLM(config)


FAMILIES = [
    llama,
    mistral,
    gemma2,
    qwen3_windowed,
    qwen3_all_windowed,
    qwen3_eager,
    qwen3_moe,
    gpt_oss,
]


@pytest.fixture(params=FAMILIES, ids=lambda family: family.__name__)
def model(request, sharp):
    return sharp(request.param())


def prompts(lengths, vocabulary=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths]
    return [tokens.tolist() for tokens in draw]


def run(engine, requests, *, every=1):
    """Submit one request every few steps, then step to the end; completions in order."""
    done = {}
    waiting = list(enumerate(requests))
    for step in range(10_000):
        if waiting and step % every == 0:
            number, (prompt, sampling) = waiting.pop(0)
            engine.submit(prompt, sampling, lambda c, number=number: done.setdefault(number, c))
        elif engine.active:
            engine.step()
        if not waiting and not engine.active:
            return [done[number] for number in range(len(requests))]
    raise AssertionError("the engine does not come to an end")


@torch.no_grad()
def generated(model, prompt, count, eos=None):
    tokens = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return tokens[0, len(prompt) :].tolist()


@torch.no_grad()
def forward_logprobs(model, prompt, tokens, temperature=1.0):
    """log π of each token by one forward over everything, without a cache."""
    logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    return [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(tokens)]


def test_greedy_is_generate_under_continuous_batching(model):
    lengths = [3, 11, 1, 7, 14]
    counts = [9, 4, 12, 1, 6]
    asked = prompts(lengths)
    engine = TransformersEngine(model, stop_tokens=[], slots=2, capacity=24)
    requests = [(p, Sampling(n, 0.0)) for p, n in zip(asked, counts, strict=True)]
    found = run(engine, requests, every=3)
    for prompt, count, completion in zip(asked, counts, found, strict=True):
        assert completion.tokens == generated(model, prompt, count)
        assert completion.finish == "length"
        assert completion.logprobs == pytest.approx(
            forward_logprobs(model, prompt, completion.tokens), abs=1e-4
        )


def test_logprobs_are_those_of_the_tempered_distribution(model):
    asked = prompts([4, 9, 2], seed=1)
    temperatures = [0.7, 1.0, 1.6]
    engine = TransformersEngine(model, stop_tokens=[], slots=2, capacity=24, seed=3)
    requests = [(p, Sampling(10, t)) for p, t in zip(asked, temperatures, strict=True)]
    for (prompt, sampling), done in zip(requests, run(engine, requests, every=2), strict=True):
        expected = forward_logprobs(model, prompt, done.tokens, sampling.temperature)
        assert done.logprobs == pytest.approx(expected, abs=1e-4)


def test_rows_of_different_temperatures_share_a_batch(tiny):
    asked = prompts([6, 6, 3, 8], 256)
    temperatures = [0.0, 1.3, 0.5, 0.0]
    engine = TransformersEngine(tiny, stop_tokens=[], slots=4, capacity=32)
    requests = [(p, Sampling(10, t)) for p, t in zip(asked, temperatures, strict=True)]
    for (prompt, sampling), completion in zip(requests, run(engine, requests), strict=True):
        expected = forward_logprobs(tiny, prompt, completion.tokens, sampling.temperature)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        if not sampling.temperature:
            assert completion.tokens == generated(tiny, prompt, 10)


def test_a_group_prefills_its_prompt_once(tiny):
    first, second = prompts([7, 12], 256)
    engine = TransformersEngine(tiny, stop_tokens=[], slots=6, capacity=32)
    rows = []
    hook = tiny.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: rows.append(args[0].shape)
    )
    done = []
    for prompt in (first, second, first, first, second):
        engine.submit(prompt, Sampling(8, 0.0), done.append)
    while engine.active:
        engine.step()
    hook.remove()
    assert rows[0] == (2, 12)
    assert [c.tokens for c in done].count(generated(tiny, first, 8)) == 3
    assert [c.tokens for c in done].count(generated(tiny, second, 8)) == 2


def test_stop_tokens_end_a_completion(tiny):
    prompt = prompts([5], 256)[0]
    greedy = generated(tiny, prompt, 12)
    stop = greedy[4]
    engine = TransformersEngine(tiny, stop_tokens=[stop, 300], slots=2, capacity=32)
    (completion,) = run(engine, [(prompt, Sampling(12, 0.0))])
    end = greedy.index(stop) + 1
    assert completion.tokens == greedy[:end]
    assert completion.finish == "stop"
    assert len(completion.logprobs) == len(completion.versions) == end


def test_a_stop_token_at_the_last_place_is_a_stop(tiny):
    prompt = prompts([5], 256)[0]
    greedy = generated(tiny, prompt, 2)
    assert greedy[0] != greedy[1]
    engine = TransformersEngine(tiny, stop_tokens=[greedy[1]], slots=1, capacity=8)
    (completion,) = run(engine, [(prompt, Sampling(2, 0.0))])
    assert completion.tokens == greedy
    assert completion.finish == "stop"


def test_tokens_keep_the_version_and_the_weights_that_drew_them(tiny, sharp):
    """After a swap, sequences go on over the keys and values of the old weights: the twin is a
    decode of the new model over the old model's own cache."""
    old, new = copy.deepcopy(tiny), sharp(copy.deepcopy(tiny), seed=5)
    prompt = prompts([6], 256)[0]
    engine = TransformersEngine(tiny, stop_tokens=[], slots=2, capacity=32, version=7)
    done = []
    engine.submit(prompt, Sampling(9, 0.0), done.append)
    for _ in range(4):
        engine.step()
    tiny.load_state_dict(new.state_dict())
    engine.version = 9
    while engine.active:
        engine.step()
    (completion,) = done
    assert completion.versions == [7] * 4 + [9] * 5

    tokens = list(prompt)
    with torch.no_grad():
        output = old(input_ids=torch.tensor([tokens]), use_cache=True)
        for step in range(9):
            logprobs = torch.log_softmax(output.logits[0, -1].float(), dim=-1)
            tokens.append(int(logprobs.argmax()))
            assert completion.tokens[step] == tokens[-1]
            assert completion.logprobs[step] == pytest.approx(float(logprobs.max()), abs=1e-4)
            source = old if step < 3 else new
            name = cache_argument(source)
            last = torch.tensor([tokens[-1:]])
            output = source(input_ids=last, **{name: getattr(output, name)})


def test_the_cache_goes_by_the_name_that_the_model_takes(tiny):
    class Older(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None, **kwargs):
            pass

    class Newer(torch.nn.Module):
        def forward(self, input_ids, cache=None, **kwargs):
            pass

    class Wrapped(torch.nn.Module):
        def get_base_model(self):
            return Newer()

        def forward(self, *args, **kwargs):
            pass

    assert cache_argument(Older()) == "past_key_values"
    assert cache_argument(Newer()) == "cache"
    assert cache_argument(Wrapped()) == "cache"
    # Warnings are errors here, so a deprecated name would fail.
    with torch.no_grad():
        tiny(input_ids=torch.tensor([[1]]), use_cache=False, **{cache_argument(tiny): None})


def test_the_seed_decides(tiny):
    asked = prompts([5, 5, 8], 256)

    def tokens(seed):
        engine = TransformersEngine(tiny, stop_tokens=[], slots=2, capacity=32, seed=seed)
        found = run(engine, [(p, Sampling(10)) for p in asked], every=2)
        return [completion.tokens for completion in found]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(tiny, temperature):
    prompt = prompts([5], 256)[0]
    draws = 20_000
    with torch.no_grad():
        tiny.lm_head.weight = torch.nn.Parameter(tiny.lm_head.weight[:8] * 0.5)
        logits = tiny(input_ids=torch.tensor([prompt])).logits[0, -1].float()
    expected = torch.softmax(logits / temperature, dim=-1) * draws
    engine = TransformersEngine(tiny, stop_tokens=[], slots=draws, capacity=6, seed=11)
    done = []
    for _ in range(draws):
        engine.submit(prompt, Sampling(1, temperature), done.append)
    engine.step()
    counts = torch.bincount(torch.tensor([c.tokens[0] for c in done]), minlength=8).float()
    assert (expected > 5).all()
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # 7 degrees of freedom: 29.9 is exceeded once in 10 000 seeds, and this seed is fixed.
    assert chi_square < 29.9
    # The bound is no empty one: it tells apart temperatures that are near each other.
    other = torch.softmax(logits / (temperature * 1.3), dim=-1) * draws
    assert float(((counts - other) ** 2 / other).sum()) > 2 * 29.9


def test_a_seed_draws_the_same_tokens_whatever_else_is_drawn(tiny):
    prompt = [3, 1, 4]

    def drawn(others, seed, engine_seed):
        engine = TransformersEngine(tiny, stop_tokens=[], slots=8, capacity=16, seed=engine_seed)
        found = []
        for _ in range(others):
            engine.submit([9, 9], Sampling(8), lambda _: None)
        engine.submit(prompt, Sampling(8, seed=seed), found.append)
        engine.submit(prompt, Sampling(8, seed=seed).numbered(1), found.append)
        while engine.active:
            engine.step()
        first, second = (completion.tokens for completion in found)
        assert first != second
        return first

    assert drawn(0, 5, 1) == drawn(3, 5, 2)
    assert drawn(0, 5, 1) != drawn(0, 6, 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e-6},
        {"max_tokens": 0},
        {"truncation": Truncation(top_p=0.0)},
        {"truncation": Truncation(top_p=float("nan"))},
        {"truncation": Truncation(top_p=2.0)},
        {"truncation": Truncation(top_k=-2)},
        {"truncation": Truncation(min_p=-0.1)},
        {"seed": 1 << 63},
    ],
    ids=str,
)
def test_settings_that_mean_nothing_cannot_be_asked_for(settings):
    with pytest.raises(InputError, match="give "):
        Sampling(**({"max_tokens": 4} | settings))


@pytest.mark.parametrize(
    "truncation", [Truncation(top_k=3), Truncation(top_p=0.6), Truncation(min_p=0.2)]
)
def test_truncation_restricts_the_draw_and_not_the_logprobs(tiny, truncation):
    prompt, draws = [3, 1, 4], 400
    engine = TransformersEngine(tiny, stop_tokens=[], slots=draws, capacity=8, seed=1)
    truncated, greedy, free = [], [], []
    for requests, sampling in (
        (truncated, Sampling(1, 1.0, truncation)),
        (greedy, Sampling(1, 0.0, truncation)),
        (free, Sampling(1, 1.0)),
    ):
        for _ in range(draws if requests is truncated else 60):
            engine.submit(prompt, sampling, requests.append)
    while engine.active:
        engine.step()
    logits = tiny(input_ids=torch.tensor([prompt])).logits[0, -1]
    full = torch.log_softmax(logits.detach().float(), dim=-1)
    likeliest = full.argsort(descending=True).tolist()
    probabilities = full.exp()
    match truncation:
        case Truncation(top_k=3):
            allowed = {*likeliest[:3]}
        case Truncation(top_p=0.6):
            mass = probabilities[likeliest].cumsum(0)
            allowed = {*likeliest[: int((mass < 0.6).sum()) + 1]}
        case _:
            least = 0.2 * float(probabilities.max())
            allowed = {t for t in likeliest if float(probabilities[t]) >= least}
    drawn = [completion.tokens[0] for completion in truncated]
    assert {*drawn} <= allowed
    assert 1 < len(allowed) < 64
    kept = float(probabilities[list(allowed)].sum())
    for token in allowed:
        share = float(probabilities[token]) / kept
        spread = 4 * math.sqrt(share * (1 - share) / draws)
        assert abs(drawn.count(token) / draws - share) <= spread
    assert {completion.tokens[0] for completion in greedy} == {likeliest[0]}
    assert not {completion.tokens[0] for completion in free} <= allowed
    for completion in truncated:
        expected = float(full[completion.tokens[0]])
        assert completion.logprobs[0] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("length", "count"), [(30, 3), (33, 1), (1, 32), (0, 4)])
def test_what_does_not_fit_is_refused(tiny, length, count):
    engine = TransformersEngine(tiny, stop_tokens=[], slots=2, capacity=32)
    with pytest.raises(InputError, match="does not fit"):
        engine.submit([1] * length, Sampling(count), print)
    assert engine.active == 0


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_an_unknown_token_is_refused_and_ends_no_other_request(tiny, token):
    engine = TransformersEngine(tiny, stop_tokens=[], slots=2, capacity=16)
    done = []
    engine.submit([1, 2], Sampling(1), done.append)
    with pytest.raises(InputError, match="not one of the model's"):
        engine.submit([1, token], Sampling(1), done.append)
    engine.step()
    assert len(done) == 1


def test_the_whole_capacity_can_be_used(tiny):
    prompt = prompts([20], 256)[0]
    engine = TransformersEngine(tiny, stop_tokens=[], slots=1, capacity=32)
    (completion,) = run(engine, [(prompt, Sampling(12, 0.0))])
    assert completion.tokens == generated(tiny, prompt, 12)


def test_cancel_all_drops_requests_and_leaves_the_engine_usable(tiny):
    engine = TransformersEngine(tiny, stop_tokens=[], slots=2, capacity=32)
    done = []
    for prompt in prompts([4, 9, 6], 256):
        engine.submit(prompt, Sampling(10, 0.0), done.append)
    for _ in range(3):
        engine.step()
    assert engine.active == 3
    engine.cancel_all()
    assert engine.active == 0
    assert engine.step() == 0
    assert not done
    prompt = prompts([7], 256, seed=4)[0]
    (completion,) = run(engine, [(prompt, Sampling(10, 0.0))])
    assert completion.tokens == generated(tiny, prompt, 10)


def test_a_callback_may_submit_the_next_turn(tiny):
    prompt = prompts([4], 256)[0]
    engine = TransformersEngine(tiny, stop_tokens=[], slots=1, capacity=32)
    turns = []

    def next_turn(completion):
        turns.append(completion.tokens)
        if len(turns) < 3:
            so_far = [token for turn in turns for token in turn]
            engine.submit(prompt + so_far, Sampling(5, 0.0), next_turn)

    engine.submit(prompt, Sampling(5, 0.0), next_turn)
    while engine.active:
        engine.step()
    assert [token for turn in turns for token in turn] == generated(tiny, prompt, 15)


def test_step_counts_its_tokens(tiny):
    engine = TransformersEngine(tiny, stop_tokens=[], slots=3, capacity=32)
    done = []
    for prompt in prompts([4, 9, 6, 2, 8], 256):
        engine.submit(prompt, Sampling(6), done.append)
    counted = 0
    while engine.active:
        counted += engine.step()
    assert counted == sum(len(c.tokens) for c in done) == 30
    assert all(math.isfinite(value) and value <= 0 for c in done for value in c.logprobs)


def linear_attention():
    settings = {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    }
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **EXPERTS, **settings))


def mamba():
    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1))


@pytest.mark.parametrize("family", [linear_attention, mamba])
def test_other_state_than_keys_and_values_is_refused(family):
    with pytest.raises(InputError, match="cannot sample from"):
        TransformersEngine(family(), stop_tokens=[])


def test_attention_with_custom_masks_is_refused(tiny):
    tiny.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="flash_attention_2"):
        TransformersEngine(tiny, stop_tokens=[])


def test_a_prompt_has_logits_of_its_last_token_only(monkeypatch):
    model = llama()
    shapes = []
    monkeypatch.setattr(
        model.lm_head, "forward", lambda hidden, of=model.lm_head.forward: note(shapes, of(hidden))
    )
    engine = TransformersEngine(model, stop_tokens=[], slots=8, capacity=64)
    for length in (3, 40, 40, 3):
        engine.submit(list(range(5, 5 + length)), Sampling(max_tokens=1), lambda _: None)
    engine.step()
    assert [shape[1] for shape in shapes] == [2], "one position for each length"


def note(shapes, logits):
    shapes.append(logits.shape)
    return logits
