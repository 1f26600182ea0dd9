"""With a run's adapter of embedding, head and linear layers in its slot, vLLM computes PEFT's
log-probabilities, of all tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch
from engine import Engine
from safetensors.torch import load_file

from deltawire.store import open_bucket
from deltawire.sync import open_publisher, read_safetensors
from deltawire.sync.chain.objects import put_blob
from deltawire.sync.publish.safetensors_files import safetensors_table
from deltawire.wire.run import ModelFile, TensorSpec

pytestmark = pytest.mark.filterwarnings("default")

TOLERANCE = 2e-5
"""Float32, log-probabilities of about -6: sums in another order differ by 1e-6."""


@pytest.fixture(scope="module")
def reference(request):
    return Path(request.config.getoption("--reference"))


@pytest.fixture(scope="module")
def adapter(reference):
    """The factors by their names in a run; PEFT also saves the base of an embedding."""
    saved = load_file(reference / "adapter" / "adapter_model.safetensors")
    return {name: one for name, one in saved.items() if ".lora_" in name}


@pytest.fixture(scope="module")
def publisher(reference, adapter, tmp_path_factory):
    """A run whose version 0 has another adapter than the reference's."""
    bucket = open_bucket(str(tmp_path_factory.mktemp("run") / "bucket"), create=True)
    settings = put_blob(bucket, (reference / "adapter" / "adapter_config.json").read_bytes())
    specs = safetensors_table(reference / "model")
    specs += [TensorSpec(name, tuple(one.shape), "F32") for name, one in adapter.items()]
    publisher = open_publisher(
        bucket, tensors(reference, {name: one * 0.5 for name, one in adapter.items()}),
        specs=specs, chunk=4096,
        model_files=[ModelFile("adapter_config.json", settings.hash, settings.bytes)],
    )  # fmt: skip
    yield publisher
    publisher.close()


def tensors(reference, adapter):
    """The bits of a version with this adapter."""
    base = {name: np.array(bits) for name, bits in read_safetensors(reference / "model").items()}
    return base | {name: one.numpy().view(np.uint32) for name, one in adapter.items()}


@pytest.fixture(scope="module")
def engine(publisher, reference, adapter, ranks):
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in adapter}
    engine = Engine(
        reference / "model", ranks=ranks, run=publisher.bucket.url, dtype="float32",
        adapter={"lora_target_modules": sorted(layers)},
    )  # fmt: skip
    yield engine
    engine.close()


def test_the_log_probabilities_of_all_tokens_are_those_of_peft(
    engine, publisher, reference, adapter
):
    from vllm import SamplingParams

    expected = load_file(reference / "expected.safetensors")
    count = sum(name.startswith("prompt.") for name in expected)
    prompts = [expected[f"prompt.{number}"].tolist() for number in range(count)]
    tokens = len(expected["tokens.0"])
    wanted = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=-1, detokenize=False)

    def found():
        outputs = engine.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False
        )
        for number, output in enumerate(outputs):
            given = output.outputs[0]
            size = expected[f"logprobs.{number}"].shape[1]
            logprobs = torch.tensor(
                [[place[token].logprob for token in range(size)] for place in given.logprobs]
            )
            yield list(given.token_ids), logprobs

    for number, (_, logprobs) in enumerate(found()):
        far = (logprobs[0] - expected[f"logprobs.{number}"][0]).abs().max()
        assert far > 0.1, "another adapter computes something else"
    publisher.publish(tensors(reference, adapter))
    publisher.flush()
    engine.reach(1)
    for number, (drawn, logprobs) in enumerate(found()):
        assert drawn == expected[f"tokens.{number}"].tolist()
        torch.testing.assert_close(logprobs, expected[f"logprobs.{number}"], atol=TOLERANCE, rtol=0)
    assert engine.call("deltawire_attest")[0]["sound"]
