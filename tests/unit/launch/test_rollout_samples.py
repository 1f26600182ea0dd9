"""`deltawire rollouts`: samples of what versions were trained on, found without listing."""

import json

import numpy as np
import pytest

from deltawire import codec
from deltawire.cli.main import main
from deltawire.errors import InputError
from deltawire.rl.evaluate.samples import SampleFilter, read_samples
from deltawire.store import DelegatingBucket, open_bare_bucket
from deltawire.sync import Mirror, Publisher, create_run, read_run
from deltawire.sync.chain.objects import put_blob
from deltawire.testing import tiny
from deltawire.train.build import byte_tokenizer
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.rollouts import Group, Trajectory, encode_group
from deltawire.wire.run import ModelFile, Run

HOSTILE = "\x1b[2J[red]\u202e"


def flat(version):
    return {name: bits.reshape(-1) for name, bits in tiny.weights(version).items()}


def trajectory(text, reward, *, cause="", mask=None):
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    mask = np.ones(len(tokens), np.uint8) if mask is None else np.array(mask, np.uint8)
    count = len(tokens)
    return Trajectory(
        tokens,
        np.full(count, -0.5, np.float32),
        np.zeros(count, np.int32),
        mask,
        reward,
        "stop",
        cause=cause,
    )


def group(number, *trajectories, family="sums"):
    prompt = np.frombuffer(f"Q{number}?\n".encode(), np.uint8).astype(np.int32)
    return Group("w0", "n", f"{family}/{number}", 1.0, prompt, list(trajectories), family)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A bucket whose versions 1 and 2 consumed three groups, one of them hostile."""
    folder = tmp_path_factory.mktemp("samples")
    byte_tokenizer().save_pretrained(folder / "model")
    bucket = open_bare_bucket(str(folder / "bucket"), create=True)
    files = {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
    run = create_run(
        bucket,
        Run(
            id="ab" * 16,
            name="seen",
            created_at=0.0,
            tensors=tiny.TENSORS,
            digest=codec.digest_model(flat(0)).hex(),
            chunk=tiny.CHUNK,
            model_files=[
                ModelFile(name=name, blob=ref.hash, bytes=ref.bytes)
                for name, data in files.items()
                for ref in [put_blob(bucket, data)]
            ],
        ),
    )
    groups = [
        group(0, trajectory("one", 1.0), trajectory("two", 0.0)),
        group(1, trajectory("a\nb", 0.5, mask=[1, 0, 1]), trajectory(HOSTILE, 0.25)),
        group(2, trajectory("three", 1.0, cause="it broke"), family="words"),
    ]
    for number, one in enumerate(groups):
        bucket.put(keys.rollout("w0", number), encode_group(one))
    blank = {name: np.zeros_like(bits) for name, bits in flat(0).items()}
    mirror = Mirror(blank, -1, codec.ZERO)
    publisher = Publisher(bucket, run, mirror, epoch=0, compaction_strides=())
    for version, consumed in enumerate([[], [0, 1], [2]]):
        metadata = CommitMetadata(step=version, consumed=[("w0", n) for n in consumed])
        publisher.publish(tiny.weights(version), metadata=metadata.to_dict())
    publisher.close()
    return folder / "bucket"


def shown(capsys, folder, *arguments):
    assert main(["rollouts", str(folder), *arguments]) == 0
    return capsys.readouterr().out


def rows(capsys, folder, *arguments):
    lines = shown(capsys, folder, "--json", *arguments).splitlines()
    return [json.loads(line) for line in lines]


def test_the_newest_versions_come_first(capsys, folder):
    found = rows(capsys, folder)
    assert [(one["version"], one["sequence"], one["index"]) for one in found] == [
        (2, 2, 0),
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]
    mixed = found[3]
    assert mixed["prompt"] == "Q1?\n"
    assert mixed["parts"] == [
        {"drawn": True, "text": "a"},
        {"drawn": False, "text": "\n"},
        {"drawn": True, "text": "b"},
    ]
    assert (mixed["tokens"], mixed["logprob_mean"], mixed["sampled"]) == (2, -0.5, [0, 0])


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--version", "1"], [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (["--family", "words"], [(2, 0)]),
        (["--task", "sums/1"], [(1, 0), (1, 1)]),
        (["--worker", "w1"], []),
        (["--min-reward", "0.5", "--version", "1"], [(0, 0), (1, 0)]),
        (["--max-reward", "0.25"], [(0, 1), (1, 1)]),
        (["--failed"], [(2, 0)]),
        (["--cause", "It BROKE"], [(2, 0)]),
        (["--cause", "out of memory"], []),
        (["--count", "2"], [(2, 0), (0, 0)]),
    ],
)
def test_filters(capsys, folder, arguments, wanted):
    found = rows(capsys, folder, *arguments)
    assert [(one["sequence"], one["index"]) for one in found] == wanted


def test_a_terminal_is_shown_the_text_and_obeys_none_of_it(capsys, folder):
    text = shown(capsys, folder, "--count", "9")
    assert "version 1 · w0/0#0 · sums/0 · reward 1 · 3 tokens · stop" in text
    assert "Q1?\na\nb" in text
    assert "failed: it broke" in text
    assert "·[2J[red]·" in text
    assert all(letter.isprintable() or letter == "\n" for letter in text)


def test_a_named_version_lists_nothing(folder):
    listed = []

    class Counting(DelegatingBucket):
        def _call(self, verb, key, operation):
            listed.extend([key] if "list" in verb else [])
            return operation()

    bucket = Counting(open_bare_bucket(str(folder)))
    run = read_run(bucket)
    listed.clear()
    wanted = SampleFilter(version=1)
    assert len(list(read_samples(bucket, run, wanted, lambda tokens: bytes(tokens).decode()))) == 4
    assert listed == []
    with pytest.raises(InputError, match="the run has no version 9"):
        list(read_samples(bucket, run, SampleFilter(version=9), str))
