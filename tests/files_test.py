"""Files are written as a whole, and those with noise in them are their owner's only."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from bandmf_tf import _files
from run_program import forked


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_closed_whatever_the_umask(tmp_path):
    umask = os.umask(0)
    try:
        folder = _files.make_secret_folder(tmp_path / "a" / "b")
    finally:
        os.umask(umask)
    assert _mode(folder) == 0o700


def test_an_open_folder_is_closed(tmp_path):
    tmp_path.chmod(0o755)
    _files.make_secret_folder(tmp_path)
    assert _mode(tmp_path) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_an_open_folder_with_something_in_it_is_refused(tmp_path, mode):
    folder = _files.make_secret_folder(tmp_path / "a")
    (folder / "noise").touch(0o600)
    _files.make_secret_folder(folder)
    folder.chmod(mode)
    with pytest.raises(PermissionError, match=f"permissions {mode:o}: .*chmod 700"):
        _files.make_secret_folder(folder)
    assert _mode(folder) == mode


def test_a_file_that_others_can_read_is_found_wherever_it_is(tmp_path):
    folder = _files.make_secret_folder(tmp_path / "a")
    inner = _files.make_secret_folder(folder / "b")
    (inner / "noise").touch(0o600)
    _files.require_closed(folder)
    (inner / "noise").chmod(0o640)
    with pytest.raises(PermissionError, match=r"noise has permissions 640: .*chmod 600"):
        _files.require_closed(folder)


def test_all_files_of_a_checkpoint_are_closed_and_no_others(tmp_path):
    names = ["ckpt-1.index", "ckpt-1.data-00000-of-00001", "ckpt-10.index", "other"]
    for name in names:
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o644)
    closed = _files.restrict_checkpoint(tmp_path / "ckpt-1")
    assert {file.name for file in closed} == set(names[:2])
    assert [_mode(tmp_path / name) for name in names] == [0o600, 0o600, 0o644, 0o644]


def test_a_folder_is_closed_with_all_that_it_holds(tmp_path):
    (tmp_path / "saved" / "variables").mkdir(parents=True)
    file = tmp_path / "saved" / "variables" / "data"
    file.write_text("")
    _files.restrict_checkpoint(tmp_path / "saved")
    assert _mode(tmp_path / "saved") == _mode(file.parent) == 0o700
    assert _mode(file) == 0o600


def test_a_file_that_is_overwritten_is_closed_before_and_after_an_error_too(tmp_path):
    file = tmp_path / "model.keras"
    file.write_text("public")
    file.chmod(0o644)

    def write():
        with _files.owner_only(file):
            assert _mode(file) == 0o600
            file.write_text("secret")
            raise OSError

    with pytest.raises(OSError):
        write()
    assert _mode(file) == 0o600


def test_a_missing_checkpoint_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="No checkpoint file"):
        _files.restrict_checkpoint(tmp_path / "ckpt")


def test_a_symbolic_link_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError, match="symbolic link"):
        _files.make_secret_folder(tmp_path / "link")


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    # Only root can give a folder away, and not in every sandbox; so this process is another user.
    another_user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another_user)
    with pytest.raises(PermissionError, match="belongs to another user"):
        _files.make_secret_folder(tmp_path)


# Folders that are written as a whole.


def _content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


OLD, NEW = {"a": b"old", "b": b"old"}, {"a": b"new", "b": b"new"}


def test_a_folder_is_written_and_replaced(tmp_path):
    folder = tmp_path / "deep" / "out"
    for contents in (OLD, NEW):
        _files.write_folder(folder, contents)
        assert _content(folder) == contents
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


def test_other_things_in_a_folder_stay(tmp_path):
    (tmp_path / "mine").write_bytes(b"mine")
    for contents in (OLD, NEW):
        _files.write_folder(tmp_path, contents)
        assert _content(tmp_path) == {**contents, "mine": b"mine"}


def test_the_working_folder_and_links_are_kept_in_place(tmp_path, monkeypatch):
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    for contents in (OLD, NEW):
        _files.write_folder(tmp_path / "link", contents)
        assert (tmp_path / "link").is_symlink()
        assert _content(real) == contents
    monkeypatch.chdir(real)
    inode = real.stat().st_ino
    _files.write_folder(".", OLD)
    assert _content(real) == OLD
    assert real.stat().st_ino == inode
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link"}


@pytest.mark.parametrize("before", [None, OLD])
@pytest.mark.parametrize(
    ("call", "number"), [("fsync", 1), ("fsync", 2), ("rename", 1), ("rename", 2)]
)
def test_a_failure_leaves_the_folder_as_it_was(tmp_path, monkeypatch, before, call, number):
    folder = tmp_path / "out"
    if before is not None:
        _files.write_folder(folder, before)
    function, calls = getattr(os, call), []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise OSError("disk full")
        return function(*arguments)

    monkeypatch.setattr(os, call, fail)
    if before is None and (call, number) == ("rename", 2):
        _files.write_folder(folder, NEW)  # A new folder needs one rename alone.
        return
    with pytest.raises(OSError, match="disk full"):
        _files.write_folder(folder, NEW)
    assert (_content(folder) if folder.exists() else None) == before
    assert [path.name for path in tmp_path.iterdir()] == ([] if before is None else ["out"])


def test_programs_that_write_a_folder_at_the_same_moment_do_not_mix_their_files(tmp_path):
    found = forked(tmp_path, "write_race", 60, 4)
    assert len(found) == 60
    for texts in found:
        assert len(set(texts) - {""}) == 1
        assert len(texts) - texts.count("") == 8


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_is_not_to_be_replaced_is_not(tmp_path, monkeypatch, has_links):
    def refuse(*arguments):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "model"
    _files.write_atomically(path, b"first", replace=False)
    with pytest.raises(FileExistsError):
        _files.write_atomically(path, b"second", replace=False)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"model": b"first"}
