from __future__ import annotations

import pytest

from bandmf_tf.runs.anchors import AnchorError, append_head

A, B, C = "a" * 64, "b" * 64, "c" * 64


def test_an_anchor_keeps_every_head_once(tmp_path):
    path = tmp_path / "anchor"
    for rounds, head in ((1, A), (1, A), (2, B), (2, B), (4, C)):
        append_head(path, rounds, head)
    assert path.read_text() == f"1 {A}\n2 {B}\n4 {C}\n"


@pytest.mark.parametrize(("rounds", "head"), [(2, C), (1, A), (1, C), (0, C)])
def test_a_run_that_went_back_is_refused(tmp_path, rounds, head):
    path = tmp_path / "anchor"
    append_head(path, 1, A)
    append_head(path, 2, B)
    with pytest.raises(AnchorError, match="older copy"):
        append_head(path, rounds, head)
    assert path.read_text() == f"1 {A}\n2 {B}\n"


def test_a_line_that_a_full_disk_cut_off_is_completed(tmp_path):
    path = tmp_path / "anchor"
    append_head(path, 0, A)
    assert not path.exists()
    for length in range(len(A) + 4):
        path.write_text(f"1 {A}\n" + f"2 {B}\n"[:length])
        append_head(path, 2, B)
        assert path.read_text() == f"1 {A}\n2 {B}\n"


@pytest.mark.parametrize("text", [b"\xff notes\n", b"\n", b"1 cc", b"1" * 5000 + b"\n"])
def test_what_is_no_anchor_is_refused(tmp_path, text):
    path = tmp_path / "anchor"
    path.write_bytes(text)
    with pytest.raises(AnchorError, match="another run"):
        append_head(path, 1, A)
