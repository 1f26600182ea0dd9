"""Runs Tinker's own client, one scenario per function, and prints the facts as JSON.

`python tinker_scenarios.py URL NAME…` runs in a separate process, because the client keeps threads.
"""

import json
import os
import subprocess
import sys
import traceback
import warnings

TEXT = list(b"abcabcabcabc")
WAIT_S = 200


def main(url, names):
    os.environ["TINKER_TELEMETRY"] = "0"
    warnings.simplefilter("ignore")
    import tinker

    service = tinker.ServiceClient(base_url=url, api_key="tml-test")
    for name in names:
        try:
            facts = globals()[name](tinker, service)
        except BaseException:
            facts = {"error": traceback.format_exc()}
        print(json.dumps({name: facts}), flush=True)  # noqa: T201
    service.close("success").result(WAIT_S)


def datum(tinker, tokens=TEXT, **inputs):
    targets = tokens[1:]
    inputs = {"target_tokens": targets, "weights": [1.0] * len(targets)} | inputs
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def create(service, **options):
    found = service.create_lora_training_client(base_model="org/tiny", rank=4, **options)
    return found.result(WAIT_S)


def loss_of(tinker, client):
    return client.forward([datum(tinker)], "cross_entropy").result(WAIT_S).metrics["loss:sum"]


def steps(tinker, client, count, rate=1e-2):
    losses = []
    for _ in range(count):
        forward = client.forward_backward([datum(tinker)] * 2, "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=rate))
        losses.append(forward.result(WAIT_S).metrics["loss:sum"])
    return losses


def loop(tinker, service):
    client = create(service)
    losses = steps(tinker, client, 60)
    sampler = client.save_weights_and_get_sampling_client().result(WAIT_S)
    prompt = tinker.ModelInput.from_ints(TEXT[:5])
    params = tinker.SamplingParams(max_tokens=4, temperature=0.0)
    answer = sampler.sample(prompt, 2, params, include_prompt_logprobs=True).result(WAIT_S)
    scores = sampler.compute_logprobs(tinker.ModelInput.from_ints(TEXT)).result(WAIT_S)
    whole = tinker.ModelInput.from_ints(TEXT)
    top = sampler.sample(
        whole, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result(WAIT_S)
    last = sampler.compute_logprobs(tinker.ModelInput.from_ints(TEXT), 2).result(WAIT_S)
    trained = client.forward([datum(tinker)], "cross_entropy").result(WAIT_S)
    stop = tinker.SamplingParams(max_tokens=9, temperature=0.0, stop="a")
    stopped = sampler.sample(prompt, 1, stop).result(WAIT_S).sequences[0]

    def seeded(seed):
        params = tinker.SamplingParams(max_tokens=12, temperature=3.0, seed=seed)
        found = sampler.sample(prompt, 2, params).result(WAIT_S).sequences
        return [list(one.tokens) for one in found]

    return {
        "lora": client.get_info().is_lora,
        "losses": losses,
        "tokens": [list(one.tokens) for one in answer.sequences],
        "reasons": [one.stop_reason for one in answer.sequences],
        "ids": [one.sequence_id for one in answer.sequences],
        "prompt": list(answer.prompt_logprobs),
        "top": top.topk_prompt_logprobs,
        "of top": list(top.prompt_logprobs),
        "scores": list(scores),
        "last": list(last),
        "trained": trained.loss_fn_outputs[0]["logprobs"].tolist(),
        "stopped": [list(stopped.tokens), stopped.stop_reason],
        "seeded": [seeded(seed) for seed in (7, 7, 8)],
    }


def resume(tinker, service):
    client = create(service)
    steps(tinker, client, 3)
    path = client.save_state("first").result(WAIT_S).path
    steps(tinker, client, 2)
    ahead = loss_of(tinker, client)
    again = service.create_training_client_from_state_with_optimizer(path).result(WAIT_S)
    steps(tinker, again, 2)
    fresh = service.create_training_client_from_state(path).result(WAIT_S)
    steps(tinker, fresh, 2)
    return {
        "path": path == f"tinker://{client.model_id}/weights/first",
        "ahead": ahead,
        "again": loss_of(tinker, again),
        "fresh": loss_of(tinker, fresh),
    }


def listed(tinker, service):
    """Tests what `RestClient` and the command line show; the calls that a bucket cannot answer."""
    client = create(service)
    path = client.save_state("listed").result(WAIT_S).path
    rest = service.create_rest_client()
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result(WAIT_S)
    session = client.model_id.partition(":")[0]
    runs = rest.list_training_runs(limit=100).result(WAIT_S)
    found = {
        "run": client.model_id in [one.training_run_id for one in runs.training_runs],
        "total": runs.cursor.total_count == len(runs.training_runs),
        "checkpoint": path
        in [one.tinker_path for one in rest.list_user_checkpoints().result(WAIT_S).checkpoints],
        "session": session in rest.list_sessions().result(WAIT_S).sessions,
        "models": client.model_id in rest.get_session(session).result(WAIT_S).training_run_ids,
    }
    environment = os.environ | {"TINKER_BASE_URL": sys.argv[1], "TINKER_API_KEY": "tml-test"}
    command = [sys.executable, "-m", "tinker.cli", "run", "list"]
    shown = subprocess.run(
        command, env=environment, capture_output=True, check=False, timeout=WAIT_S
    )
    found["command"] = shown.stdout.decode() + shown.stderr.decode()
    gone = f"tinker://{client.model_id}/weights/gone"
    refusals = {
        "publish": lambda: rest.publish_checkpoint_from_tinker_path(path),
        "storage": rest.get_current_checkpoint_storage_usage,
        "gone": lambda: rest.delete_checkpoint_from_tinker_path(gone),
    }
    for name, call in refusals.items():
        try:
            call().result(WAIT_S)
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def losses(tinker, service):
    """Each loss on data whose old log-probabilities are the model's own: the gradients of the
    ratio losses are then those of Σ −A·x, whatever their clipping."""
    client = create(service)
    plain = client.forward([datum(tinker)], "cross_entropy").result(WAIT_S)
    old = plain.loss_fn_outputs[0]["logprobs"].tolist()
    data = {"target_tokens": TEXT[1:], "logprobs": old, "advantages": [0.5] * len(old)}
    whole = tinker.Datum(model_input=tinker.ModelInput.from_ints(TEXT[:-1]), loss_fn_inputs=data)
    found = {}
    for name in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
        client.forward_backward([whole], name)
        step = client.optim_step(tinker.AdamParams(learning_rate=0.0)).result(WAIT_S)
        found[name] = step.metrics["grad_norm:mean"]
    return found


def custom(tinker, service):
    """A loss on the client has the gradient of the same loss on the server."""
    client = create(service)
    data = [datum(tinker), datum(tinker, list(b"xyzxyzxy"))]
    client.forward_backward(data, "cross_entropy")
    builtin = client.optim_step(tinker.AdamParams(learning_rate=0.0)).result(WAIT_S).metrics

    def loss(data, logprobs):
        return -sum(one.sum() for one in logprobs), {"mine": 1.0}

    output = client.forward_backward_custom(data, loss).result(WAIT_S)
    own = client.optim_step(tinker.AdamParams(learning_rate=0.0)).result(WAIT_S).metrics
    return {
        "builtin": builtin["grad_norm:mean"],
        "own": own["grad_norm:mean"],
        "metrics": dict(output.metrics),
    }


def refused(tinker, service):
    client = create(service)
    found = {}

    def attempt(name, run):
        try:
            run()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = ""

    def wait(future):
        return future.result(WAIT_S)

    attempt("loss", lambda: wait(client.forward_backward([datum(tinker)], "stable_reinforce")))
    attempt(
        "setting",
        lambda: wait(client.forward_backward([datum(tinker)], "ppo", {"unknown": 1.0})),
    )
    attempt("token", lambda: wait(client.forward([datum(tinker, [1, 9999, 2])], "cross_entropy")))
    attempt("base", lambda: wait(service.create_lora_training_client(base_model="org/other")))
    attempt("external", lambda: wait(client.save_weights_external("exported")))
    nan = tinker.AdamParams(learning_rate=float("nan"))
    attempt("rate", lambda: wait(client.optim_step(nan)))
    attempt("optimizer", lambda: wait(client.optim_step(tinker.DimuonParams(learning_rate=0.1))))
    gone = f"tinker://{client.model_id}/weights/gone"
    attempt("checkpoint", lambda: wait(service.create_training_client_from_state(gone)))
    attempt("sampler", lambda: wait(service.create_sampling_client(model_path=gone)))
    client.save_state("one").result(WAIT_S)
    attempt("twice", lambda: wait(client.save_state("one")))
    base = wait(service.create_sampling_client(base_model="org/tiny"))
    prompt = tinker.ModelInput.from_ints(TEXT)
    plain = tinker.SamplingParams(max_tokens=1)
    attempt("topk", lambda: wait(base.sample(prompt, 1, plain, topk_prompt_logprobs=300)))
    endless = tinker.ModelInput.from_ints((TEXT * 500)[:5000])
    attempt("long", lambda: wait(base.sample(endless, 1, tinker.SamplingParams())))
    for name, wrong in {
        "temperature": {"temperature": -1.0},
        "top_p": {"top_p": 2.0},
        "top_k": {"top_k": -3},
        "no tokens": {"max_tokens": 0},
    }.items():
        params = tinker.SamplingParams(**({"max_tokens": 1} | wrong))
        attempt(name, lambda params=params: wait(base.sample(prompt, 1, params)))
    long = tinker.SamplingParams(max_tokens=10_000)
    attempt("context", lambda: wait(base.sample(prompt, 1, long)))
    found["after"] = loss_of(tinker, client)  # None of it broke the model.
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
