"""A mechanism file brings back the mechanism bit for bit, and nothing else loads."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bandmf_tf import _files, schemas
from bandmf_tf.accounting import (
    BallsInBins,
    BoundedPoissonSampling,
    FixedSizeSampling,
    MinSeparationSampling,
    OncePerEpoch,
    PoissonSampling,
    SecretParts,
    Shuffling,
)
from bandmf_tf.accounting.gaussian import Adjacency, PrivacyGuarantee
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization import buffered, inverse_banded, strategies, trees, workloads
from bandmf_tf.factorization.participation import FixedEpochs, MinSeparation, SingleParticipation
from bandmf_tf.factorization.sensitivity import Sensitivity
from bandmf_tf.mechanisms import files
from bandmf_tf.mechanisms.files import (
    MechanismFileError,
    load_mechanism,
    mechanism_checksum,
    save_mechanism,
)
from bandmf_tf.mechanisms.mechanism import Mechanism, Provenance

N = 8


def _bands(num_bands: int) -> np.ndarray:
    bands = np.random.default_rng(0).normal(size=(num_bands, N))
    bands[0] = np.abs(bands[0]) + 0.5
    bands[-1, 0] = -0.0  # The sign of zero and numbers without full precision are content, too.
    bands[-1, 1] = 5e-324
    return np.where(strategies.inside_matrix(num_bands, N), bands, 0.0)


STRATEGIES = {
    "banded": strategies.BandedStrategy(_bands(3)),
    "toeplitz": strategies.ToeplitzStrategy(np.array([1.0, 0.5, -1 / 3]), N),
    "identity": strategies.identity(N),
    "dense": strategies.DenseStrategy(strategies.BandedStrategy(_bands(N)).materialize()),
    "full tree": trees.TreeStrategy(N, "full", 1 / 3),
    "online tree": trees.TreeStrategy(N, "online"),
    "blt": buffered.BufferedStrategy(np.array([0.9, 1 / 3]), np.array([0.2, 0.1]), N, 1 / 7),
    "inverse banded": inverse_banded.InverseBandedStrategy(np.array([1.0, -0.6, 1 / 7]), N),
}
WORKLOADS = {
    "prefix sum": workloads.prefix_sum(N),
    "constant": workloads.sgd(N, 0.95, np.full(N, 0.1)),
    "schedule": workloads.sgd(N, 0.9, workloads.warmup_cooldown_schedule(N)),
}
SAMPLING = {
    "none": None,
    "poisson": PoissonSampling.from_sizes(N, 3, batch_size=7, dataset_size=100),
    "fixed size": FixedSizeSampling(N, 3, np.int64(7), 100),
    "shuffling": Shuffling(N, 3, 7, 100, reshuffled=True),
    "bounded": BoundedPoissonSampling(N, 3, 0.2, np.int64(20), 100),
    "balls in bins": BallsInBins(N, 3),
    "secret parts": SecretParts(N, 3, 0.2),
    "b-min-sep": MinSeparationSampling(N, 3, 0.2),
    "once an epoch": OncePerEpoch(N, 3, 5),
}
CERTIFIED = ("balls in bins", "secret parts", "b-min-sep")


def _mechanism(strategy="banded", workload="prefix sum", sampling="none", **changes) -> Mechanism:
    scheme = SAMPLING[sampling]
    arguments = {
        "participation": scheme.participation if scheme else MinSeparation(3),
        "noise_multiplier": 3.3,
        "l2_norm_clip": 0.1,
        "delta": 1e-7,
        "sampling": scheme,
        "notes": {"loss": 0.1, "iterations": 12, "converged": True, "method": "é"},
        **changes,
    }
    return Mechanism.create(STRATEGIES[strategy], WORKLOADS[workload], **arguments)


def _members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def _archive(members: dict[str, bytes], **options) -> bytes:
    """Packs members as the documentation says: stored, in order, with fixed attributes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", options.get("compression", zipfile.ZIP_STORED)) as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name, options.get("date", (1980, 1, 1, 0, 0, 0)))
            info.create_system, info.external_attr = 3, 0o644 << 16
            info.compress_type = archive.compression
            archive.writestr(info, data)
    return buffer.getvalue()


def _resealed(data: bytes, edit: Callable[[dict], None]) -> bytes:
    """Edits the manifest and computes the checksum again, as the documentation says."""
    members = _members(data)
    manifest = json.loads(members["mechanism.json"])
    edit(manifest)
    manifest.pop("checksum", None)

    def dump() -> bytes:
        return (json.dumps(manifest, sort_keys=True, indent=2) + "\n").encode()

    manifest["checksum"] = hashlib.sha256(dump()).hexdigest()
    return _archive({**members, "mechanism.json": dump()})


def _assert_rejected(path, data: bytes, words: str | None = None) -> None:
    path.write_bytes(data)
    with pytest.raises(MechanismFileError, match=words) as caught:
        load_mechanism(path)
    assert str(caught.value).startswith(f"{path} is not a valid mechanism file: ")


def _is_accepted(data: bytes) -> bool:
    """Loads from memory: tests that try every byte would otherwise wait for the disk."""
    try:
        files._parse(data)
    except files._REJECTIONS:
        return False
    return True


@pytest.fixture
def path(tmp_path):
    return tmp_path / f"plan{files.SUFFIX}"


@pytest.fixture
def saved(path) -> bytes:
    save_mechanism(_mechanism(), path)
    return path.read_bytes()


def _arrays(mechanism: Mechanism) -> list[bytes]:
    strategy = mechanism.strategy
    stored = [strategy.materialize(), mechanism.workload.learning_rates]
    stored += [getattr(strategy, name) for name in strategy.arrays]
    return [array.tobytes() for array in stored]


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_and_workload_comes_back_bit_for_bit(path, strategy, workload):
    mechanism = _mechanism(strategy, workload)
    checksum = save_mechanism(mechanism, path)
    loaded = load_mechanism(path)
    assert type(loaded.strategy) is type(mechanism.strategy)
    assert _arrays(loaded) == _arrays(mechanism)
    assert loaded.workload.momentum == mechanism.workload.momentum
    for field in dataclasses.fields(Mechanism):
        if field.name not in ("strategy", "workload"):
            assert getattr(loaded, field.name) == getattr(mechanism, field.name), field.name
    assert checksum == mechanism_checksum(mechanism) == mechanism_checksum(loaded)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_every_sampling_comes_back(path, sampling):
    mechanism = _mechanism(sampling=sampling)
    save_mechanism(mechanism, path)
    loaded = load_mechanism(path)
    assert loaded.sampling == mechanism.sampling
    assert loaded.verify_epsilon() == mechanism.guarantee


@pytest.mark.parametrize(
    "participation",
    [
        SingleParticipation(),
        FixedEpochs(np.int64(3), 2),
        MinSeparation(2, 3),
        MinSeparation(2),
    ],
)
def test_every_participation_comes_back(path, participation):
    save_mechanism(_mechanism(participation=participation), path)
    assert load_mechanism(path).participation == participation


def test_equal_mechanisms_give_equal_bytes_and_different_ones_different_checksums(tmp_path):
    mechanism = _mechanism()
    first, second = tmp_path / "first", tmp_path / "second"
    save_mechanism(mechanism, first)
    save_mechanism(load_mechanism(first), second)
    assert first.read_bytes() == second.read_bytes()
    others = [
        mechanism,
        _mechanism("toeplitz"),
        _mechanism(workload="constant"),
        _mechanism(sampling="poisson"),
        _mechanism(noise_multiplier=3.4),
        _mechanism(l2_norm_clip=0.2),
        _mechanism(notes={}),
    ]
    assert len({mechanism_checksum(other) for other in others}) == len(others)


def test_the_checksum_of_a_mechanism_of_version_1_never_changes():
    """If this fails, ledgers that name mechanisms by their checksum have lost them."""
    pinned = Mechanism(
        strategy=STRATEGIES["toeplitz"],
        workload=workloads.sgd(N, 0.5, np.arange(1.0, N + 1)),
        participation=SingleParticipation(),
        sampling=None,
        noise_multiplier=2.0,
        l2_norm_clip=1.0,
        sensitivity=Sensitivity(7 / 6, "exact", "largest column norm"),
        guarantee=PrivacyGuarantee(
            5.0, 1e-6, (7 / 12) ** 2 / 2, Adjacency.ZERO_OUT, "by hand", ("none",)
        ),
        discretization=1e-4,
        provenance=Provenance("0.1.0", "2024-02-29T12:00:00Z", {"note": 1}),
    )
    assert (
        mechanism_checksum(pinned)
        == "c99f16a2f5bc779ce72714fa98649da095096489608362cc058296233f989db6"
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_files_have_the_lowest_version_that_can_express_them(strategy):
    def version(**changes) -> int:
        manifest = files._sealed(_mechanism(strategy, **changes))[0]
        assert set(files._CONVENTIONS) <= manifest["conventions"].keys()
        return manifest["version"]

    is_new = strategy in ("blt", "inverse banded")
    assert version() == (3 if is_new else 2)
    assert version(discretization=1e-3) == (3 if is_new else 1)
    assert version(sampling="balls in bins") == 4
    if strategy == "banded":
        assert version(sampling="shuffling") == 2
        assert version(sampling="bounded") == 4


def test_the_largest_number_of_rounds_is_that_of_the_schema():
    schema = schemas.validator(f"mechanism-v{files.VERSION}").schema
    assert schema["$defs"]["num_rounds"]["maximum"] == files.MAX_NUM_ROUNDS


def test_standard_tools_open_the_file(saved):
    mechanism = _mechanism()
    members = _members(saved)
    assert list(members) == ["mechanism.json", "strategy_bands.npy"]
    bands = np.load(io.BytesIO(members["strategy_bands.npy"]), allow_pickle=False)
    np.testing.assert_array_equal(bands, mechanism.strategy.bands)
    manifest = json.loads(members["mechanism.json"])
    assert manifest["noise_multiplier"] == mechanism.noise_multiplier
    assert manifest["guarantee"]["epsilon"] == mechanism.epsilon
    assert "r2 - r1" in manifest["conventions"]["min_separation"]


def test_the_schema_is_a_schema_and_knows_every_field(saved):
    validator = schemas.validator(f"mechanism-v{files.VERSION}")
    jsonschema.Draft202012Validator.check_schema(validator.schema)
    manifest = json.loads(_members(saved)["mechanism.json"])
    assert manifest.keys() == validator.schema["properties"].keys()
    assert set(validator.schema["required"]) == manifest.keys()


def test_a_file_with_any_byte_changed_is_rejected(path, saved):
    assert _is_accepted(saved)
    flips = np.random.default_rng(0).integers(1, 256, size=(3, len(saved)))
    for position in range(len(saved)):
        for flip in (1, *flips[:, position]):
            damaged = bytearray(saved)
            damaged[position] ^= flip
            assert not _is_accepted(bytes(damaged)), position


def test_a_file_truncated_anywhere_is_rejected(path, saved):
    assert not any(_is_accepted(saved[:length]) for length in range(len(saved)))
    _assert_rejected(path, saved[:-1], "whole zip archive")


@settings(max_examples=500)
@given(data=st.data())
def test_a_file_edited_anyhow_is_rejected(data):
    saved = files.encode_mechanism(EDITED)
    start = data.draw(st.integers(0, len(saved)))
    stop = data.draw(st.integers(start, min(start + 40, len(saved))))
    edited = saved[:start] + data.draw(st.binary(max_size=40)) + saved[stop:]
    assert _is_accepted(edited) == (edited == saved)


EDITED = _mechanism("toeplitz")


@settings(max_examples=300)
@given(content=st.binary(max_size=200), as_manifest=st.booleans())
def test_foreign_bytes_are_rejected(content, as_manifest):
    assert not _is_accepted(_archive({"mechanism.json": content}) if as_manifest else content)


@pytest.mark.parametrize(
    "manifest",
    [
        b"[1, 2]",
        b"{}",
        b'{"format": "other"}',
        b'{"format": "bandmf_tf mechanism"}',
        b'{"format": "bandmf_tf mechanism", "version": "1"}',
        b"[" * 100_000,
        b'{"format": "bandmf_tf mechanism", "arrays": ' + b"[" * 900 + b"]" * 900 + b"}",
        b" " * (2**20 + 1),
    ],
    ids=lambda data: data[:50].decode(),
)
def test_foreign_manifests_are_rejected(path, manifest):
    _assert_rejected(path, _archive({"mechanism.json": manifest}), r"mechanism\.json")


def test_a_newer_version_is_named(path, saved):
    newer = _resealed(saved, lambda manifest: manifest.update(version=5))
    _assert_rejected(path, newer, "version 5 and this library reads up to 4")


def test_resealing_is_what_the_library_does(path, saved):
    """So that the edits below are rejected for what they change."""
    assert _resealed(saved, lambda manifest: None) == saved


def _edit(*keys: str, value) -> Callable[[dict], None]:
    def edit(manifest: dict) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        assert manifest[keys[-1]] != value
        manifest[keys[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_edit("sensitivity", "value", value=0.1), "states a sensitivity"),
        (_edit("sensitivity", "kind", value="guess"), "sensitivity.kind"),
        (_edit("guarantee", "rho", value=0.01), "states rho"),
        (_edit("guarantee", "epsilon", value=0.01), "states epsilon"),
        (_edit("guarantee", "delta", value=1e-9), "states epsilon"),
        (_edit("guarantee", "adjacency", value="replace-one"), "adjacency"),
        (_edit("noise_multiplier", value=33.0), "states rho"),
        (_edit("noise_multiplier", value=float("inf")), "JSON compliant|finite"),
        (_edit("participation", "min_separation", value=4), "states a sensitivity"),
        (_edit("participation", "max_participations", value=1), "states a sensitivity"),
        (_edit("participation", "schema", value="single"), "single"),
        (_edit("num_rounds", value=N + 1), "num_rounds"),
        (_edit("num_rounds", value=10**12), "num_rounds"),
        (_edit("num_bands", value=2), "bytes"),
        (_edit("strategy", "kind", value="dense"), "lacks its array matrix"),
        (_edit("strategy", "kind", value="tree"), "strategy"),
        (_edit("workload", "learning_rate", value=None), "workload_learning_rates"),
        (_edit("arrays", "strategy_bands", "shape", value=[N, 3]), "shape"),
        (_edit("arrays", "strategy_bands", "sha256", value="0" * 64), "SHA-256"),
        (_edit("arrays", value={}), "must have the arrays"),
        (_edit("sampling", value={"kind": "poisson"}), "sampling"),
        (_edit("provenance", "created", value="yesterday"), "created"),
        (_edit("provenance", "notes", value={"loss": None}), "notes"),
        (_edit("conventions", "rho", value="something else"), "bytes"),
        (lambda manifest: manifest.update(more=1), "more"),
        (lambda manifest: manifest.pop("guarantee"), "guarantee"),
    ],
)
def test_an_edited_manifest_with_a_new_checksum_is_rejected(path, saved, edit, words):
    _assert_rejected(path, _resealed(saved, edit), words)


@pytest.mark.parametrize(
    "edit",
    [_edit("l2_norm_clip", value=0.2), _edit("sensitivity", "kind", value="upper bound")],
)
def test_a_forged_mechanism_that_agrees_with_itself_has_another_checksum(path, saved, edit):
    """What the checksum is for; an exact sensitivity is an upper bound, too."""
    path.write_bytes(_resealed(saved, edit))
    assert mechanism_checksum(load_mechanism(path)) != mechanism_checksum(_mechanism())


def test_a_sampling_that_the_participation_does_not_allow_is_rejected(path):
    save_mechanism(_mechanism(sampling="poisson"), path)
    edited = _resealed(path.read_bytes(), _edit("participation", "max_participations", value=2))
    _assert_rejected(path, edited, "use sampling.participation")


@pytest.mark.parametrize("sampling", CERTIFIED)
def test_certificates_are_stored_and_verified_sample_by_sample(path, sampling):
    mechanism = _mechanism(sampling=sampling, noise_multiplier=2.0)
    certificate = mechanism.guarantee.certificate
    assert certificate.samples > 0
    assert "confidence 1 - 1e-12" in mechanism.describe()
    save_mechanism(mechanism, path)
    saved = path.read_bytes()
    loaded = load_mechanism(path)
    assert loaded.guarantee == mechanism.guarantee
    assert loaded.verify_epsilon() == mechanism.guarantee
    edited = _edit("guarantee", "certificate", "samples", value=certificate.samples + 8192)
    path.write_bytes(_resealed(saved, edited))
    with pytest.raises(BandMFError, match="seed gives"):
        load_mechanism(path).verify_epsilon()

    def without(manifest: dict) -> None:
        manifest["guarantee"].pop("certificate")
        manifest["guarantee"]["epsilon"] *= 0.9

    path.write_bytes(_resealed(saved, without))
    with pytest.raises(BandMFError, match="its noise gives"):
        load_mechanism(path).verify_epsilon()
    smaller = _edit("guarantee", "epsilon", value=mechanism.epsilon * 0.9)
    _assert_rejected(path, _resealed(saved, smaller), "certificate must be for the sampling")


def test_other_containers_of_the_same_members_are_rejected(path, saved):
    members = _members(saved)
    for data in (
        _archive({**members, "more.txt": b""}),
        _archive({**members, "more.npy": members["strategy_bands.npy"]}),
        _archive({name: members[name] for name in reversed(members)}),
        _archive({"mechanism.json": members["mechanism.json"]}),
        _archive({"strategy_bands.npy": members["strategy_bands.npy"]}),
        _archive(members, compression=zipfile.ZIP_DEFLATED),
        _archive(members, date=(2024, 1, 1, 0, 0, 0)),
        saved + b"\0",
        b"\0" + saved,
    ):
        _assert_rejected(path, data)


def test_two_members_of_one_name_are_rejected(path, saved):
    members = _members(saved)
    buffer = io.BytesIO(saved)
    with zipfile.ZipFile(buffer, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("strategy_bands.npy", members["strategy_bands.npy"])
    _assert_rejected(path, buffer.getvalue())


def test_a_zip_bomb_is_not_unpacked(path):
    bomb = _archive({"mechanism.json": bytes(10**8)}, compression=zipfile.ZIP_DEFLATED)
    assert len(bomb) < 10**6
    _assert_rejected(path, bomb, "larger than the file")


def test_a_file_beyond_the_limit_is_neither_written_nor_read(path, saved, monkeypatch):
    monkeypatch.setattr(files, "_MAX_FILE_BYTES", len(saved) - 1)
    _assert_rejected(path, saved, "longer than")
    path.unlink()
    with pytest.raises(MechanismFileError, match="fewer bands"):
        save_mechanism(_mechanism(), path)
    assert not path.exists()


def test_a_manifest_may_be_as_long_as_the_limit_and_no_longer(path, saved, monkeypatch):
    size = len(_members(saved)["mechanism.json"])
    monkeypatch.setattr(files, "_MAX_MANIFEST_BYTES", size)
    assert _is_accepted(saved)
    monkeypatch.setattr(files, "_MAX_MANIFEST_BYTES", size - 1)
    _assert_rejected(path, saved, f"at most {size - 1} bytes")


def test_a_missing_file_is_an_os_error(path):
    with pytest.raises(FileNotFoundError):
        load_mechanism(path)


def test_a_strategy_of_an_unknown_class_is_not_saved(path, monkeypatch):
    class Other(strategies.ToeplitzStrategy):
        pass

    monkeypatch.setitem(STRATEGIES, "other", Other(np.ones(1), N))
    mechanism = _mechanism("other")
    with pytest.raises(TypeError, match="Found Other"):
        save_mechanism(mechanism, path)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_while_saving_leaves_the_old_file(path, saved, monkeypatch, step):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_files.os, step, fail)
    with pytest.raises(OSError, match="No space"):
        save_mechanism(_mechanism("toeplitz"), path)
    monkeypatch.undo()
    assert path.read_bytes() == saved
    assert list(path.parent.iterdir()) == [path]
    load_mechanism(path)


def test_saving_flushes_the_file_before_its_name_and_the_folder_after(path, monkeypatch):
    events = []
    for name in ("fsync", "replace"):
        function = getattr(os, name)

        def record(*arguments, _name=name, _function=function):
            events.append(_name)
            return _function(*arguments)

        monkeypatch.setattr(_files.os, name, record)
    save_mechanism(_mechanism(), path)
    assert events == ["fsync", "replace", "fsync"]
