"""The fast part of the reproduction: digits of the paper that take seconds, not minutes."""

from __future__ import annotations

import csv
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from bandmf_tf.accounting.amplification import PoissonSampling
from tools.reproduce_paper import __main__ as reproduce_paper
from tools.reproduce_paper import (
    drawing,
    heat_maps,
    matrix_pictures,
    matrix_table,
    noise_multipliers,
    optimal_bands,
    production_guarantees,
    published,
    report,
)
from tools.reproduce_paper.report import Entry, Table

# Cells of the optimal-bands table on both sides of the line where one band becomes best. Cells with
# fewer than 16 epochs need strategies of hundreds of bands, epsilon = 16 seconds a candidate.
SAMPLED_CELLS = ((0.03125, 1024), (0.5, 16), (0.5, 32), (2.0, 64), (8.0, 256))
GRID_EPSILONS, GRID_EPOCHS = (0.5, 1.0, 2.0), (64, 256, 1024)


@pytest.fixture(scope="module")
def grid_searches():
    cells = [(epsilon, k) for epsilon in GRID_EPSILONS for k in GRID_EPOCHS]
    return optimal_bands.search_cells(cells)


def _is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def _table(*entries: Entry) -> Table:
    return Table("name", "Title", "tab:label", ("A convention.",), entries)


def test_the_paper_prints_this_many_numbers():
    assert len(published.MATRICES) == 8
    assert sum(len(row) for row in published.FEDERATED.values()) == 25
    assert sum(len(row) for row in published.AMPLIFIED.values()) == 15
    assert len(optimal_bands.ALL_CELLS) == 110
    assert all(len(row) == 11 for row in published.OPTIMAL_BANDS.values())


@pytest.mark.parametrize(
    ("printed", "ours", "matches"),
    [
        ("0.43490", 0.434896, True),
        ("0.43490", 0.434906, False),
        ("1.00", 0.995001, True),
        ("1.00", 0.994999, False),
        ("32", 32.0, True),
        ("32", 16.0, False),
    ],
)
def test_an_entry_matches_if_it_rounds_to_the_printed_digits(printed, ours, matches):
    assert Entry("row", "column", Decimal(printed), ours).matches is matches


def test_a_difference_is_measured_in_units_of_the_last_printed_digit():
    assert Entry("row", "column", Decimal("4.22"), 4.2275).last_digits == pytest.approx(0.75)


def test_numbers_without_a_counterpart_are_shown_but_not_counted():
    table = _table(Entry("a", "x", Decimal("1.0"), 1.01), Entry("b", "x", None, 2.0))
    assert table.summary().startswith("name: 1 of 1 printed values match")
    assert "b  x          -     2.000000" in report.format_table(table)
    with pytest.raises(ValueError, match="prints no number"):
        _ = table.entries[1].difference


def test_text_and_csv_show_paper_ours_difference_and_note(tmp_path):
    table = _table(Entry("row", "column", Decimal("1.00"), 1.25, "A reason."))
    text = report.format_table(table)
    assert "  - A convention." in text
    assert "1.00       1.2500  +0.2500   differs *" in text
    assert "  * A reason." in text
    with report.write_csv(table, tmp_path).open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert row == {
        "row": "row",
        "column": "column",
        "paper": "1.00",
        "ours": "1.25",
        "difference": "0.25",
        "matches": "False",
        "note": "A reason.",
    }
    assert _is_png(drawing.draw_differences(table, tmp_path))


def test_unamplified_noise_multipliers_agree_to_five_digits():
    unit = dict.fromkeys(("DP-SGD", "Single-epoch MF", "Optimal TreeAgg", "Band MF"), 1.0)
    table = noise_multipliers.federated_table(unit)
    differing = [(entry.row, entry.column) for entry in table.entries if not entry.matches]
    # The paper contradicts itself there: 0.65293 and, for the same release, 0.65294.
    assert differing == [("Single-epoch MF", "epsilon = 8")]
    assert len(table.entries) == 20
    assert table.left_out == ("Multi-epoch MF",)


def test_the_factor_of_multi_epoch_mf_is_the_same_at_every_epsilon():
    table = noise_multipliers.federated_table({"Multi-epoch MF": 1.1269})
    assert table.num_matches == 5


def test_amplified_noise_multipliers_agree_to_five_digits():
    table = noise_multipliers.amplified_table()
    assert (table.num_matches, len(table.entries)) == (15, 15)


def test_a_batch_of_1000_does_not_give_the_amplified_digits():
    sampling = PoissonSampling.from_sizes(2052, 9, 1000, noise_multipliers.DATASET_SIZE)
    ours = sampling.noise_multiplier(1.0, 1e-6, num_bands=9, max_column_norm=6**-0.5)
    printed = published.AMPLIFIED[1]["Band MF, amplified"]
    assert not Entry("Band MF", "epsilon = 1", printed, ours).matches
    assert ours == pytest.approx(float(printed), rel=1e-2)


def test_tree_dp_sgd_and_128_bands_agree_with_the_matrix_table():
    rows = [row for row in published.MATRICES if row.mechanism in _FAST_MATRICES]
    table = matrix_table.matrix_table(matrix_table.StackOverflowMatrices(), rows)
    assert [entry for entry in table.entries if not entry.matches] == []
    assert len(table.entries) == 20
    assert table.left_out[-1] == "MF, equal norms T"


_FAST_MATRICES = {"OptTreeAgg", "DP-SGD", "MF (b=128)"}


def test_sampled_entries_of_the_optimal_bands_table_agree(tmp_path):
    searches = optimal_bands.search_cells(SAMPLED_CELLS)
    table = optimal_bands.optimal_bands_table(searches)
    assert [entry for entry in table.entries if not entry.matches] == []
    assert {search.best.num_bands for search in searches.values()} == {1, 2}
    assert _is_png(optimal_bands.draw_optimal_bands(searches, tmp_path))


def test_a_differing_number_of_bands_is_explained(grid_searches, monkeypatch):
    row = list(published.OPTIMAL_BANDS[1.0])
    row[published.OPTIMAL_BANDS_EPOCHS.index(64)] = 4
    monkeypatch.setitem(published.OPTIMAL_BANDS, 1.0, tuple(row))
    entry = next(
        entry
        for entry in optimal_bands.optimal_bands_table(grid_searches).entries
        if not entry.matches
    )
    assert (entry.row, entry.column) == ("epsilon = 1", "k = 64")
    assert "the paper's 4 have" in entry.note


def test_heat_maps_show_what_the_text_says(grid_searches, tmp_path):
    grid = heat_maps.rmse_grid(grid_searches, heat_maps.dense_losses(GRID_EPOCHS))
    assert grid.dense is not None
    np.testing.assert_array_equal(grid.num_bands, [[1, 1, 1], [1, 1, 1], [2, 1, 1]])
    # Weights proportional to sqrt(n - j) on a diagonal: sqrt(8 / 9) of the identity's error.
    np.testing.assert_allclose(grid.dense[:, -1] / grid.dp_sgd[:, -1], np.sqrt(8 / 9), rtol=2e-3)
    holds = {entry.row: entry.ours for entry in heat_maps.heat_map_table(grid).entries}
    assert holds.pop(published.RMSE_CLAIMS["regimes"]) in (0.0, 1.0)  # Needs the rest of the grid.
    assert set(holds.values()) == {1.0}
    assert _is_png(heat_maps.draw_heat_maps(grid, tmp_path))
    lines = heat_maps.write_cells(grid, tmp_path).read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 9


def test_heat_maps_without_dense_matrices_say_what_is_missing(grid_searches, tmp_path):
    grid = heat_maps.rmse_grid(grid_searches, None)
    table = heat_maps.heat_map_table(grid)
    assert len(table.entries) == 4
    assert table.left_out == ("panel (a) and the MF line of panel (c)",)
    assert _is_png(heat_maps.draw_heat_maps(grid, tmp_path))


def test_production_guarantees_agree_for_the_tree_and_are_explained_for_bandmf():
    figures = production_guarantees.production_figures(tolerance=5e-4)
    assert figures.tree_sensitivity.value**2 == pytest.approx(51)
    assert figures.chain.value < figures.theorem_3.value
    table = production_guarantees.production_table(figures)
    by_name = {(entry.row, entry.column): entry for entry in table.entries}
    assert by_name["Online TreeAgg", "rho"].matches
    assert by_name["Online TreeAgg", "epsilon"].matches
    assert by_name["BandMF, launch (Google's notebook)", "rho"].matches
    assert by_name["BandMF, launch (Google's notebook)", "epsilon"].matches
    banded = by_name["BandMF, Theorem 3", "epsilon"]
    assert not banded.matches
    assert banded.note
    assert banded.ours == pytest.approx(4.27, abs=0.02)
    assert by_name["BandMF, Theorem 3", "rho"].ours == pytest.approx(0.2277, abs=0.002)
    assert by_name["BandMF, chain programme", "rho"].ours == pytest.approx(0.2251, abs=0.002)


def test_there_are_eight_factorizations_of_a_multiple_of_eight():
    assert len(matrix_pictures.factorizations(16)) == 8
    with pytest.raises(ValueError, match="multiple of 8"):
        matrix_pictures.factorizations(12)


def test_multi_epoch_mf_has_negative_diagonals_an_epoch_apart():
    C = matrix_pictures.factorizations(64)["MF, k = 4 epochs"]().materialize()
    for offset in (16, 32, 48):
        assert np.all(np.diagonal(C, -offset)[:-1] < 0.0)  # The last one vanishes.
    assert np.all(np.diagonal(C, -8) > 0.0)


def test_the_program_draws_matrices_and_prints_a_summary(tmp_path, capsys):
    argv = ["reproduce_paper", "--only=pictures", "--quick", f"--output={tmp_path / 'new'}"]
    assert reproduce_paper.main(argv) == 0
    assert "pictures: drawn" in capsys.readouterr().out
    pictures = sorted((tmp_path / "new").iterdir())
    assert [path.name for path in pictures] == ["matrix_pictures.png", "tree_pictures.png"]
    assert all(map(_is_png, pictures))


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--only=tables", "only must list sections out of matrices"),
        ("--only=", "Found none."),
        ("--onyl=bands", "did you mean --only?"),
        ("--output=/dev/null/folder", "output must be a folder that can be written"),
        ("bands", "Every argument must be a flag"),
    ],
)
def test_bad_flags_get_one_sentence_and_status_2(flag, sentence, capsys):
    assert reproduce_paper.main(["reproduce_paper", flag]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
