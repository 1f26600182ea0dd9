"""deltawire's replacements of vLLM's CPU kernels compute what vLLM specifies."""

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("default")

HEADS, WIDTH, ROTATED = 4, 128, 64


@pytest.fixture(scope="module", params=[True, False], ids=["in use", "not in use"])
def rotation(request):
    """vLLM's rotation as an engine makes it, and whether the engine uses deltawire."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config = VllmConfig(
        compilation_config=CompilationConfig(custom_ops=["all"]),
        additional_config={"deltawire": {}} if request.param else {},
    )
    with set_current_vllm_config(config):
        made = RotaryEmbedding(
            ROTATED, ROTATED, 256, 10000.0, is_neox_style=False, dtype=torch.float32
        )
    assert made._forward_method == made.forward_cpu
    return made, request.param


def slices(tokens):
    """Positions, and queries and keys as latent attention has them: slices of wider rows."""
    drawn = torch.Generator().manual_seed(tokens)
    query = torch.randn(tokens, HEADS, WIDTH, generator=drawn)
    key = torch.randn(tokens, 640, generator=drawn)
    positions = torch.randint(0, 256, (tokens,), generator=drawn)
    return positions, query[..., -ROTATED:], key[:, -ROTATED:].unsqueeze(1)


def expected(rotation, positions, query, key):
    """By vLLM's own slow way."""
    cache = rotation.cos_sin_cache
    return rotation.forward_static(positions, query, key, ROTATED, ROTATED, cache, False)


@pytest.mark.parametrize("tokens", [1, 2, 17, 70])
def test_slices_are_rotated_whole_and_each_by_its_own_position(rotation, tokens):
    rotate, in_use = rotation
    given = slices(tokens)
    wanted = expected(rotate, *given)
    found = rotate(*given)
    right = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))
    # vLLM without our fix still fails. Once it passes, our fix can be removed.
    assert right == in_use


def test_a_rotation_does_not_depend_on_the_other_tokens(rotation):
    rotate, in_use = rotation
    if not in_use:
        pytest.skip("vLLM's own does")
    positions, query, key = slices(70)
    separate = rotate(positions[:9], query[:9].clone(), key[:9].clone())
    among = rotate(positions, query.clone(), key.clone())
    assert all(torch.equal(a, b[:9]) for a, b in zip(separate, among, strict=True))


def test_flat_queries_go_to_the_kernel(rotation):
    rotate, _ = rotation
    positions, query, key = slices(70)
    flat = (query.reshape(70, -1), key.reshape(70, -1))
    wanted = expected(rotate, positions, *flat)
    found = rotate(positions, *flat)
    assert found[0].data_ptr() == flat[0].data_ptr()
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))
