"""Requests as Tinker's client sends them, made without it."""

import json

import numpy as np

from deltawire.tinker import schema

TEXT = list(b"abcabcabc")


def forward_backward(model, number, *, loss="cross_entropy", texts=(TEXT,), **options):
    """The bytes of a forward_backward request over whole texts."""
    found = schema.message("ForwardBackwardRequest")()
    found.model_id, found.seq_id, found.loss_fn = model, number, loss
    found.forward_only = options.get("forward_only", False)
    for tokens in texts:
        datum = found.data.add()
        chunk = datum.model_input.add()
        chunk.encoded_text.tokens = np.asarray(tokens[:-1], np.int32).tobytes()
        add_tensor(datum, "target_tokens", np.asarray(tokens[1:], np.int64))
        add_tensor(datum, "weights", np.ones(len(tokens) - 1, np.float32))
    return found.SerializeToString()


def add_tensor(datum, name, values):
    tensor = datum.loss_fn_inputs[name]
    tensor.dtype = 1 if values.dtype == np.float32 else 2
    tensor.dense = values.tobytes()
    tensor.shape.extend(values.shape)


def optim_step(model, number, *, rate=1e-2):
    params = {"learning_rate": rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
    return json.dumps({"model_id": model, "seq_id": number, "adam_params": params}).encode()


def save(model, number, name, **options):
    return json.dumps({"model_id": model, "seq_id": number, "path": name} | options).encode()


def save_sampler(model, number, session_number, **options):
    body = {"model_id": model, "seq_id": number, "sampling_session_seq_id": session_number}
    return json.dumps(body | options).encode()


def create_model(session, number=0, **lora):
    body = {"session_id": session, "model_seq_id": number, "base_model": "org/tiny"}
    config = {"rank": 4} | lora
    return json.dumps(body | {"lora_config": config, "type": "create_model"}).encode()


def sample(sampler, number, *, tokens=TEXT, **options):
    body = {"sampling_session_id": sampler, "seq_id": number, "num_samples": 1}
    body["prompt"] = {"chunks": [{"tokens": tokens, "type": "encoded_text"}]}
    body["sampling_params"] = {"max_tokens": 2, "temperature": 0.0}
    return json.dumps(body | options).encode()


async def result_of(server, future):
    """Waits for a future of the server."""
    while (found := await server.retrieve(future["request_id"], hold_s=60)) is None:
        pass
    return found


def logprobs_of(result):
    """The log-probabilities of a forward_backward's result, of all its data."""
    output = schema.parse("ForwardBackwardOutput", result.body)
    return np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, np.float32)
