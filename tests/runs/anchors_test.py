from __future__ import annotations

import pytest

from bandmf_tf.runs.anchors import AnchorError, append_head

BEGIN, A, B, C, D = (letter * 64 for letter in "0abcd")


def test_an_anchor_keeps_every_head_once(tmp_path):
    path = tmp_path / "anchor"
    for hashes in ([BEGIN, A], [BEGIN, A], [BEGIN, A, B], [BEGIN, A, B], [BEGIN, A, B, D, C]):
        append_head(path, hashes)
    assert path.read_text() == f"1 {A}\n2 {B}\n4 {C}\n"


@pytest.mark.parametrize(
    "hashes",
    [[BEGIN, A, C], [BEGIN, A], [BEGIN, C], [BEGIN], [BEGIN, A, C, D], [BEGIN, C, D, D, D]],
)
def test_a_run_that_went_back_is_refused(tmp_path, hashes):
    """Also one that has passed the anchor again since then, while nobody kept it."""
    path = tmp_path / "anchor"
    append_head(path, [BEGIN, A])
    append_head(path, [BEGIN, A, B])
    with pytest.raises(AnchorError, match="older copy"):
        append_head(path, hashes)
    assert path.read_text() == f"1 {A}\n2 {B}\n"


def test_a_line_that_a_full_disk_cut_off_is_completed(tmp_path):
    path = tmp_path / "anchor"
    append_head(path, [BEGIN])
    assert not path.exists()
    for length in range(len(A) + 4):
        path.write_text(f"1 {A}\n" + f"2 {B}\n"[:length])
        append_head(path, [BEGIN, A, B])
        assert path.read_text() == f"1 {A}\n2 {B}\n"


@pytest.mark.parametrize("text", [b"\xff notes\n", b"\n", b"1 cc", b"1" * 5000 + b"\n"])
def test_what_is_no_anchor_is_refused(tmp_path, text):
    path = tmp_path / "anchor"
    path.write_bytes(text)
    with pytest.raises(AnchorError, match="another run"):
        append_head(path, [BEGIN, A])
