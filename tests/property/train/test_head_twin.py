"""The chunked head against its slow twin: plain logits of all tokens at once, in float64."""

import families
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.errors import InputError
from deltawire.train.head import LogitTransform, chunk_tokens, head_of, head_terms

GEMMA = LogitTransform(1.0, 30.0)
COHERE = LogitTransform(0.0625)


def plain_terms(hidden, weight, targets, *, bias, transform, temperature):
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logps = torch.log_softmax(transform(logits) / temperature, -1)
    return logps.gather(1, targets[:, None])[:, 0], -(logps.exp() * logps).sum(-1)


def drawn(seed, tokens, vocabulary, hidden, *, biased, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    tensors = [draw(tokens, hidden), draw(vocabulary, hidden), draw(vocabulary) if biased else None]
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return tensors, targets, draw(2, tokens)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 20),
    vocabulary=st.integers(1, 40),
    chunk=st.integers(1, 24),
    biased=st.booleans(),
    transform=st.sampled_from([LogitTransform(), GEMMA, COHERE, LogitTransform(3.0, 5.0)]),
    temperature=st.sampled_from([1.0, 0.6, 2.0]),
    entropy_gradient=st.booleans(),
)
def test_values_and_gradients_are_the_plain_ones(
    seed, tokens, vocabulary, chunk, biased, transform, temperature, entropy_gradient
):
    inputs, targets, upstream = drawn(seed, tokens, vocabulary, 6, biased=biased)
    if not entropy_gradient:
        upstream[1] = 0
    found, expected = [], []
    for result, dtype in ((found, torch.float32), (expected, torch.float64)):
        leaves = [None if x is None else x.to(dtype).requires_grad_() for x in inputs]
        hidden, weight, bias = leaves
        options = {"bias": bias, "transform": transform, "temperature": temperature}
        if dtype == torch.float64:
            terms = plain_terms(hidden, weight, targets, **options)
        else:
            options["bias_V"] = options.pop("bias")
            terms = head_terms(
                hidden, weight, targets, **options, chunk=chunk, entropy_gradient=entropy_gradient
            )
            assert terms.entropies.requires_grad == entropy_gradient
        loss = terms[0] @ upstream[0].to(dtype) + terms[1] @ upstream[1].to(dtype)
        gradients = torch.autograd.grad(loss, [x for x in leaves if x is not None])
        result += [*terms, *gradients]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fp32", [False, True])
def test_half_precision(fp32):
    """bf16 weights: a float32 head computes with them as they are, but loses nothing more."""
    (hidden, weight, _), targets, _ = drawn(1, 64, 300, 32, biased=False, dtype=torch.bfloat16)
    exact = plain_terms(
        hidden.double(), weight.double(), targets,
        bias=None, transform=LogitTransform(), temperature=1.0,
    )  # fmt: skip
    weight.requires_grad_()
    terms = head_terms(hidden, weight, targets, fp32=fp32, chunk=24)
    terms.logprobs.sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    error = float((terms.logprobs.detach() - exact[0]).abs().max())
    assert error < 1e-4 if fp32 else 1e-4 < error < 0.2


def test_the_chunk_follows_from_the_vocabulary():
    sizes = [chunk_tokens(vocabulary) for vocabulary in (10, 264, 32_000, 151_936, 10**6)]
    assert sizes == [4096, 4096, 2048, 384, 256]


class Tail(torch.nn.Module):
    """A model of one token whose head's output a function changes."""

    def __init__(self, change, head=None):
        super().__init__()
        self.head = head or torch.nn.Linear(4, 9, bias=False)
        self.change = change

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, use_cache):
        assert not use_cache
        hidden = torch.ones(*input_ids.shape, 4)
        return type("Output", (), {"logits": self.change(self.head(hidden))})


@pytest.mark.parametrize(
    ("change", "transform"),
    [
        (lambda z: z, (1.0, 0.0)),
        (lambda z: (z / 6).float(), (1 / 6, 0.0)),
        (lambda z: torch.tanh(z / 30) * 30, (1.0, 30.0)),
        (lambda z: torch.tanh(z * 0.25 / 15) * 15, (0.25, 15.0)),
    ],
)
def test_a_familys_transform_is_found(change, transform):
    model = Tail(change).train()
    assert head_of(model).transform == pytest.approx(transform, rel=1e-6)
    assert model.training


@pytest.mark.parametrize("change", [torch.relu, lambda z: z + 1, lambda z: z[..., :5]])
def test_another_transform_is_refused_by_name(change):
    with pytest.raises(InputError, match="Tail changes the output"):
        head_of(Tail(change))


def test_a_head_that_is_not_linear_is_refused_by_name():
    with pytest.raises(InputError, match="Tail: its head is a Sequential"):
        head_of(Tail(lambda z: z, torch.nn.Sequential(torch.nn.Linear(4, 9))))


def test_cohere_scales():
    assert head_of(families.build("cohere2_moe")).transform == COHERE
