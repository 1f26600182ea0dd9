"""Names of builds: of a release, of a checkout, and which of them may be in one run."""

import subprocess

import pytest

from deltawire import __version__
from deltawire.builds import MAX_BUILD, build_name, commit_of, release_of, work_together
from deltawire.dashboard.builds import builds_of, builds_problem, builds_words

COMMIT = "2270cdc6388b90d9f269752b85cbaf7ab45d58db"


@pytest.fixture
def checkout(tmp_path):
    """The package's folder in a checkout whose HEAD names a branch without a commit."""
    package = tmp_path / "src" / "deltawire"
    package.mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    return package


def test_a_branch(checkout):
    git = checkout.parents[1] / ".git"
    assert commit_of(checkout) == ""
    (git / "packed-refs").write_text(
        f"# pack-refs\n{'0' * 40} refs/heads/old\n{COMMIT} refs/heads/main\n"
    )
    assert commit_of(checkout) == COMMIT
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "refs" / "heads" / "main").write_text("1" * 40 + "\n")
    assert commit_of(checkout) == "1" * 40, "a loose reference is newer than a packed one"


def test_a_commit_that_is_on_no_branch(checkout):
    (checkout.parents[1] / ".git" / "HEAD").write_text(COMMIT + "\n")
    assert commit_of(checkout) == COMMIT


@pytest.mark.parametrize("head", [b"", b"ref: refs/heads/none", b"\xff\xfe", b"../../etc/passwd"])
def test_a_damaged_repository_has_no_commit(checkout, head):
    (checkout.parents[1] / ".git" / "HEAD").write_bytes(head)
    assert commit_of(checkout) == ""


def test_a_worktree(checkout, tmp_path):
    root = checkout.parents[1]
    other = tmp_path / "other"
    (other / "src" / "deltawire").mkdir(parents=True)
    kept = root / ".git" / "worktrees" / "other"
    kept.mkdir(parents=True)
    (other / ".git").write_text(f"gitdir: {kept}\n")
    (kept / "HEAD").write_text("ref: refs/heads/side\n")
    (kept / "commondir").write_text("../..\n")
    (root / ".git" / "refs" / "heads").mkdir(parents=True)
    (root / ".git" / "refs" / "heads" / "side").write_text(COMMIT)
    assert commit_of(other / "src" / "deltawire") == COMMIT


def test_a_wheel(tmp_path):
    package = tmp_path / "site-packages" / "deltawire"
    package.mkdir(parents=True)
    assert commit_of(package) == ""
    (package / "commit.txt").write_text("\n")
    assert commit_of(package) == "", "a wheel of a release"
    (package / "commit.txt").write_text(COMMIT + "\n")
    assert commit_of(package) == COMMIT


def test_packages_of_an_environment_in_a_checkout_have_no_commit(checkout):
    package = checkout.parents[1] / "lib" / "deltawire"
    package.mkdir(parents=True)
    (checkout.parents[1] / ".git" / "HEAD").write_text(COMMIT)
    assert commit_of(package) == ""


def test_the_name_of_this_build(capsys):
    from deltawire.cli.main import main

    name = build_name()
    assert name.split("+")[0] == __version__
    assert len(name) <= MAX_BUILD
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"deltawire {name}\n"


def test_git_agrees(tmp_path):
    """Git's own files, where git is installed."""
    package = tmp_path / "src" / "deltawire"
    package.mkdir(parents=True)
    (package / "x").write_text("x")
    try:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    except FileNotFoundError:
        return
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "-c", "commit.gpgsign=false", "commit", "-qm", "a"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert commit_of(package) == head.stdout.strip()


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("0.1.0", "0.1.0+g2270cdc6388b", True),
        ("0.1.0", "0.2.0rc1", True),
        ("0.3.1", "0.1.0", False),
        ("0.9.0", "1.0.0", True),
        ("0.9.0", "1.1.0", False),
        ("", "0.9.0", True),
    ],
)
def test_which_work_together(one, other, together):
    assert work_together(one, other) == work_together(other, one) == together
    names = builds_of([(one, "trainer"), (other, "w0")])
    assert bool(builds_problem(names)) != together


def test_objects_of_a_run_name_the_build(tmp_path):
    import numpy as np

    from deltawire import open_publisher
    from deltawire.runtime.heartbeat import HeartbeatWriter, read_heartbeat
    from deltawire.store import open_bucket
    from deltawire.sync import read_manifest, read_run

    bucket = open_bucket(str(tmp_path / "run"), create=True)
    with open_publisher(bucket, {"a": np.zeros(4, "f4")}) as publisher:
        publisher.publish({"a": np.ones(4, "f4")}, metadata={"of": "the application"})
    run = read_run(bucket)
    manifests = [read_manifest(bucket, run, version) for version in range(2)]
    assert [run.build, *(one.build for one in manifests)] == [build_name()] * 3
    assert manifests[1].metadata == {"of": "the application"}
    writer = HeartbeatWriter(bucket, "w0", "worker", nonce="n", host="h", supervised=False)
    writer.start()
    writer.close()
    assert read_heartbeat(bucket, "w0").build == build_name()


def test_numbers_of_a_release():
    assert [release_of(one) for one in ("12.34.5", "0.2", "1", "v0.1")] == [
        (12, 34),
        (0, 2),
        (0, 0),
        (0, 0),
    ]


def test_words():
    workers = [("0.2.0", f"w{number}") for number in range(6)]
    assert builds_words(builds_of([])) == builds_words(builds_of([("", "trainer")])) == ""
    assert builds_words(builds_of(workers)) == "build: 0.2.0"
    words = builds_words(builds_of([("", "trainer"), *workers]))
    assert words == "builds: without a name (trainer); 0.2.0 (w0, w1, w2, w3 and 2 more)"
