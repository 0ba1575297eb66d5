"""Files with noise in them are closed to everybody but their owner."""

from __future__ import annotations

import os
import stat

import pytest

from bandmf_tf import secret_files


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_closed_whatever_the_umask(tmp_path):
    umask = os.umask(0)
    try:
        folder = secret_files.make_secret_folder(tmp_path / "a" / "b")
    finally:
        os.umask(umask)
    assert _mode(folder) == 0o700


def test_an_open_folder_is_closed(tmp_path):
    tmp_path.chmod(0o755)
    secret_files.make_secret_folder(tmp_path)
    assert _mode(tmp_path) == 0o700


def test_all_files_of_a_checkpoint_are_closed_and_no_others(tmp_path):
    names = ["ckpt-1.index", "ckpt-1.data-00000-of-00001", "ckpt-10.index", "other"]
    for name in names:
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o644)
    closed = secret_files.restrict_checkpoint(tmp_path / "ckpt-1")
    assert {file.name for file in closed} == set(names[:2])
    assert [_mode(tmp_path / name) for name in names] == [0o600, 0o600, 0o644, 0o644]


def test_a_folder_is_closed_with_all_that_it_holds(tmp_path):
    (tmp_path / "saved" / "variables").mkdir(parents=True)
    file = tmp_path / "saved" / "variables" / "data"
    file.write_text("")
    secret_files.restrict_checkpoint(tmp_path / "saved")
    assert _mode(tmp_path / "saved") == _mode(file.parent) == 0o700
    assert _mode(file) == 0o600


def test_a_missing_checkpoint_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="No checkpoint file"):
        secret_files.restrict_checkpoint(tmp_path / "ckpt")


def test_a_symbolic_link_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError, match="symbolic link"):
        secret_files.make_secret_folder(tmp_path / "link")


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    # Only root can give a folder away, and not in every sandbox; so this process is another user.
    another_user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another_user)
    with pytest.raises(PermissionError, match="belongs to another user"):
        secret_files.make_secret_folder(tmp_path)
