"""Names that another user of the machine made first are not followed, and not trusted."""

import os
import stat
from pathlib import Path

import pytest
from signed_run import SignedRun

from deltawire.errors import InputError
from deltawire.private_files import open_private, private_folder, read_private, replace_private
from deltawire.runtime.highest_version import HighestVersion
from deltawire.runtime.supervisor import Supervisor
from deltawire.store import open_bucket
from deltawire.sync import Checkout, load_mirror, open_mirror, read_run

SOMEBODY = 54321
SHARED_MEMORY = Path("/dev/shm")


def give_away(path):
    """Make ``path`` another user's, or return a path of another user: only root may give away."""
    if os.geteuid() != 0:
        return Path("/usr") if path.is_dir() else Path("/etc/hosts")
    os.chown(path, SOMEBODY, SOMEBODY, follow_symlinks=False)
    return path


@pytest.fixture
def victim(tmp_path):
    """A file and a folder that a link would lead to; nothing may change in them."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "file").write_bytes(b"precious")
    yield folder
    assert (folder / "file").read_bytes() == b"precious"
    assert [path.name for path in folder.iterdir()] == ["file"]


@pytest.fixture
def run(tmp_path):
    return SignedRun(tmp_path / "bucket", versions=2)


def test_a_folder_is_made_for_this_user_only(tmp_path):
    umask = os.umask(0)
    try:
        made = private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert private_folder(made) == made


def test_a_link_in_the_place_of_a_folder_is_refused(tmp_path, victim):
    link = tmp_path / "link"
    link.symlink_to(victim, target_is_directory=True)
    with pytest.raises(InputError, match="not a folder, or a link to one"):
        private_folder(link)
    link.unlink()
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError):
        private_folder(link)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_write_to_is_refused(tmp_path, mode):
    folder = tmp_path / "wide"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(InputError, match=r"other users may write to .*chmod go-w"):
        private_folder(folder)


def test_files_and_folders_of_others_are_refused(tmp_path):
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    file.write_bytes(b"")
    with pytest.raises(InputError, match="belongs to another user"):
        private_folder(give_away(folder))
    with pytest.raises(InputError, match="belongs to another user"):
        read_private(give_away(file), 10)


def test_links_pipes_and_second_names_are_no_files(tmp_path, victim):
    link, pipe, second = (tmp_path / name for name in ("link", "pipe", "second"))
    link.symlink_to(victim / "file")
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_TRUNC):
        with pytest.raises(InputError, match="is a link, which is not followed"):
            open_private(link, flags)
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="not a regular file"):  # And it does not wait for one.
        read_private(pipe, 10)
    os.link(victim / "file", second)
    with pytest.raises(InputError, match="second name of another file"):
        open_private(second, os.O_RDWR)
    second.unlink()


def test_a_file_is_replaced_and_not_written_through(tmp_path, victim):
    path = tmp_path / "link"
    path.symlink_to(victim / "file")
    replace_private(path, b"mine")
    assert path.read_bytes() == b"mine"
    assert not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_private(tmp_path / "none", 10) is None


def places(tmp_path):
    """Where mirrors lie: on a disk, and in shared memory where there is one."""
    return [tmp_path, *([SHARED_MEMORY] if SHARED_MEMORY.is_dir() else [])]


def test_a_mirror_is_no_link_and_no_file_of_others(tmp_path, victim, run):
    table = read_run(run.bucket())
    for place in places(tmp_path):
        path = place / f"deltawire-test-{os.getpid()}.mirror"
        try:
            path.symlink_to(victim / "file")
            with pytest.raises(InputError, match="is a link"):
                open_mirror(path, table)
            path.unlink()
            path.write_bytes(b"")
            path.chmod(0o666)
            with pytest.raises(InputError, match="other users may write"):
                open_mirror(path, table)
            path.chmod(0o600)
            with pytest.raises(InputError, match=r"belongs to another user|Permission denied"):
                open_mirror(give_away(path), table)
            path.unlink()
            mirror = open_mirror(path, table)
            load_mirror(run.bucket(), table, into=mirror)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            mirror.close()
        finally:
            path.unlink(missing_ok=True)


def test_a_pulled_directorys_staging_is_this_users(tmp_path, victim, run):
    table = read_run(run.bucket())
    store = tmp_path / ".model.deltawire"
    store.symlink_to(victim, target_is_directory=True)
    with pytest.raises(InputError, match="not a folder, or a link to one"):
        Checkout(run.bucket(), table, tmp_path / "model")
    store.unlink()
    store.mkdir()
    store.chmod(0o777)
    with pytest.raises(InputError, match="other users may write"):
        Checkout(run.bucket(), table, tmp_path / "model")
    store.chmod(0o755)
    (store / "lock").symlink_to(victim / "file")
    with pytest.raises(InputError, match="is a link"):
        Checkout(run.bucket(), table, tmp_path / "model")
    (store / "lock").unlink()
    store.rmdir()
    umask = os.umask(0)
    try:
        with Checkout(run.bucket(), table, tmp_path / "model"):
            assert stat.S_IMODE(store.stat().st_mode) == 0o755
    finally:
        os.umask(umask)


def test_logs_and_remembered_versions_are_this_users(tmp_path, victim):
    logs = tmp_path / "logs"
    logs.symlink_to(victim, target_is_directory=True)
    supervisor = Supervisor(open_bucket("memory://"), logs)
    with pytest.raises(InputError, match="not a folder, or a link to one"):
        supervisor.add("w0", "worker", ["--help"])
    with pytest.raises(InputError, match="not a folder, or a link to one"):
        HighestVersion("k", "r", "u", folder=logs).note(3)
