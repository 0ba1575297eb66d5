"""A registry admits nobody too soon or too often, and forgets nobody, whatever happens."""

import collections
import contextlib
import dataclasses
import importlib.util
import itertools
import os
import sqlite3
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
import registry_program
import run_program
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.participation import FixedEpochs, SingleParticipation
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.runs.ledger import LedgerWriter, Pseudonyms, read_ledger
from bandmf_tf.runs.registry import Outcome, ParticipationRegistry, RegistryError
from registry_program import CLIENTS, make_mechanism

# The URL of a database that tests may empty.
POSTGRES = os.environ.get("BANDMF_POSTGRES") if importlib.util.find_spec("psycopg") else None
NO_SERVER = "No PostgreSQL is there, or no psycopg: tools/build/with_postgresql.sh starts a server."
BACKENDS = [
    None,
    pytest.param(POSTGRES, marks=pytest.mark.skipif(POSTGRES is None, reason=NO_SERVER)),
]


def _emptied(database):
    if database is not None:
        import psycopg

        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute("DROP SCHEMA IF EXISTS bandmf_registry CASCADE")


@contextlib.contextmanager
def _quick_folder():
    """A folder in memory: what is tested with it would wait for the disk most of the time."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(params=BACKENDS, ids=["sqlite", "postgresql"])
def start(request, tmp_path):
    """Starts the registry of a test, again each time."""
    _emptied(request.param)
    opened = []

    def start(mechanism=None):
        opened.append(
            ParticipationRegistry.start(
                tmp_path / "registry", mechanism or make_mechanism(), database=request.param
            )
        )
        return opened[-1]

    yield start
    for registry in opened:
        registry.close()


@dataclasses.dataclass
class Oracle:
    """What a registry must do, by brute force over complete histories."""

    b: int
    k: int
    n: int
    charged: dict = dataclasses.field(default_factory=lambda: collections.defaultdict(set))
    number: int = -1
    attempt: int = 0
    state: str = "counted"
    here: dict = dataclasses.field(default_factory=dict)

    def begin(self, number):
        again = number == self.number >= 0
        following = number == self.number + 1 and self.state == "counted"
        if not (again or following) or number >= self.n:
            return None
        self.attempt = self.attempt + 1 if again else 0
        self.number, self.state, self.here = number, "open", {}
        return (number, self.attempt)

    def is_open(self, handle):
        return handle == (self.number, self.attempt) and self.state == "open"

    def may(self, client):
        rounds = self.charged[client] | ({self.number} if client in self.here else set())
        far = all(abs(self.number - earlier) >= self.b for earlier in rounds)
        return far and len(rounds) < self.k

    def invite(self, clients, at_most):
        chosen = [c for c in dict.fromkeys(clients) if self.may(c)][:at_most]
        self.here.update(dict.fromkeys(chosen, "invited"))
        return chosen

    def arrived(self, clients):
        moved = [c for c in dict.fromkeys(clients) if self.here.get(c) == "invited"]
        for client in moved:
            self.here[client] = "arrived"
            self.charged[client].add(self.number)
        return moved

    def dropped(self, clients):
        moved = [c for c in dict.fromkeys(clients) if self.here.get(c) in ("invited", "arrived")]
        for client in moved:
            self.here[client] = "dropped"
        return moved


CLIENT_LISTS = st.lists(st.sampled_from(CLIENTS[:3]), min_size=1, max_size=4)
# A round whose clients are these, of whom so many arrive, and how it ends.
ROUNDS = st.tuples(CLIENT_LISTS, st.integers(0, 6), st.sampled_from(["count"] * 3 + ["discard"]))
STEPS = st.one_of(
    st.tuples(st.just("begin"), st.integers(-1, 2)),
    st.tuples(st.just("invite"), CLIENT_LISTS, st.integers(0, 4)),
    st.tuples(st.just("arrived"), CLIENT_LISTS),
    st.tuples(st.just("dropped"), CLIENT_LISTS),
    st.tuples(st.just("count")),
    st.tuples(st.just("discard")),
    st.tuples(st.just("crash")),
    st.tuples(st.just("zombie")),
)


def _refused(action, *arguments):
    with pytest.raises(RegistryError) as caught:
        action(*arguments)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


HISTORIES = st.lists(st.tuples(ROUNDS, st.lists(STEPS, max_size=4)), max_size=8)


def _single_steps(history):
    for (clients, arriving, end), steps in history:
        yield "begin", 1
        yield "invite", clients, 4
        if clients[:arriving]:
            yield "arrived", clients[:arriving]
        yield (end,)
        yield from steps


def _interleave(history, b, k, database):
    mechanism = make_mechanism(6, b, k)
    oracle, handles, summed = Oracle(b, k, 6), [], collections.defaultdict(list)
    _emptied(database)
    with _quick_folder() as folder, contextlib.ExitStack() as opened:

        def start():
            registry = ParticipationRegistry.start(folder / "r", mechanism, database=database)
            return opened.enter_context(registry)

        registry = start()
        for name, *arguments in _single_steps(history):
            if name == "begin":
                number = oracle.number + arguments[0]
                expected = oracle.begin(number)
                if expected is None:
                    if number >= 0:
                        _refused(registry.begin_round, number)
                    continue
                handles.append(registry.begin_round(number))
                assert (handles[-1].number, handles[-1].attempt) == expected
            elif name == "crash":  # The old program is not even told.
                registry = start()
            elif not handles:
                continue
            elif name == "zombie":  # From here on the oldest program that is left acts.
                handles.append(handles.pop(0))
            else:
                handle = handles[-1]
                if not oracle.is_open((handle.number, handle.attempt)):
                    _refused(getattr(handle, name), *arguments)
                elif name in ("count", "discard"):
                    counted = handle.count() if name == "count" else handle.discard()
                    oracle.state = "counted" if name == "count" else "discarded"
                    if counted:
                        names = {c for c, outcome in oracle.here.items() if outcome == "arrived"}
                        assert set(counted.participants) == set(map(registry.pseudonym, names))
                        missing = len(oracle.here) - len(names)
                        assert counted.flags.get("dropped_clients", 0) == missing
                    oracle.here = {}
                else:
                    found = getattr(handle, name)(*arguments)
                    assert sorted(found) == sorted(getattr(oracle, name)(*arguments))
                    if name == "arrived":
                        for client in found:
                            summed[client].append(handle.number)
            for client, rounds in summed.items():  # Whatever was in a sum, released or not.
                assert len(rounds) <= k
                assert all(s - r >= b for r, s in itertools.pairwise(rounds)), client
        if oracle.number >= 0:
            may = {client for client in CLIENTS[:5] if oracle.may(client)}
            assert set(registry.eligible(oracle.number, CLIENTS[:5])) == may
            known = set(map(registry.pseudonym, CLIENTS[:5]))
            registry.enroll(CLIENTS[:5])
            assert set(registry.eligible(oracle.number)) == known & set(
                map(registry.pseudonym, may)
            )


@given(HISTORIES, st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=100)
def test_any_interleaving_of_programs_and_crashes_does_what_complete_histories_allow(history, b, k):
    _interleave(history, b, k, None)


@pytest.mark.skipif(POSTGRES is None, reason=NO_SERVER)
@given(HISTORIES, st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=30)
def test_postgresql_does_the_same(history, b, k):
    _interleave(history, b, k, POSTGRES)


def test_a_round_as_in_the_field(start):
    registry = start()
    attempt = registry.begin_round(0)
    cohort = attempt.invite(CLIENTS, at_most=6)  # Four are wanted.
    assert cohort == CLIENTS[:6]
    assert attempt.arrived([cohort[0], cohort[1], "never invited"]) == cohort[:2]
    assert attempt.dropped([cohort[1], cohort[2]]) == [cohort[1], cohort[2]]
    assert attempt.arrived([cohort[2]]) == []  # Too late.
    with pytest.raises(RegistryError, match="needs at least 4 clients and 1 have arrived"):
        attempt.count(minimum=4)
    assert attempt.arrived(cohort) == cohort[3:]
    assert attempt.arrived(cohort) == []
    counted = attempt.count(minimum=4)
    assert len(counted.participants) == 4
    assert counted.flags == {"dropped_clients": 2}
    assert registry.outcomes(0) == {
        Outcome.COUNTED: 4,
        Outcome.DROPPED: 1,
        Outcome.LEFT_OUT: 1,
    }
    # Nothing of the third arrived, so it may be asked; of the second something may be in the sum.
    following = registry.begin_round(1)
    assert following.invite(CLIENTS) == [CLIENTS[2], *CLIENTS[6:]]


def test_who_arrived_stays_charged_with_a_discarded_round(start):
    registry = start()
    attempt = registry.begin_round(0)
    attempt.invite(CLIENTS[:4])
    attempt.arrived(CLIENTS[:2])
    attempt.discard()
    again = registry.begin_round(0)
    assert again.invite(CLIENTS[:6]) == CLIENTS[2:6]


def test_a_program_that_was_overtaken_adds_and_counts_nothing(start):
    first = start().begin_round(0)
    first.invite(CLIENTS[:4])
    second = start().begin_round(0)
    assert second.invite(CLIENTS[:4]) == CLIENTS[:4]  # Nothing of the first attempt had arrived.
    for action in (first.invite, first.arrived, first.dropped):
        _refused(action, CLIENTS)
    _refused(first.count)
    _refused(first.discard)
    assert second.arrived(CLIENTS[:4]) == CLIENTS[:4]


def test_rounds_never_go_back_leave_no_gap_and_end_with_the_plan(start):
    registry = start()
    _refused(registry.begin_round, 1)
    for number in range(registry_program.NUM_ROUNDS):
        registry.begin_round(number)
        _refused(registry.begin_round, number + 1)  # Not before it was counted.
        registry.join_round(number).count()
        _refused(registry.join_round, number)
    _refused(registry.begin_round, 1)
    with pytest.raises(RegistryError, match="planned for num_rounds=3"):
        registry.begin_round(3)


@pytest.mark.parametrize("change", [{"num_rounds": 4}, {"min_separation": 3}, {"most": 1}])
def test_another_mechanism_is_refused(start, change):
    start()
    with pytest.raises(RegistryError, match="go on with what it began with"):
        start(make_mechanism(**change))


def test_plans_that_a_registry_cannot_keep_are_refused(tmp_path):
    strategy = ToeplitzStrategy([1.0, 0.5], 6).to_banded()
    epochs = cases.make_mechanism(strategy, FixedEpochs(2, 3))
    with pytest.raises(RegistryError, match="plan it with MinSeparation"):
        ParticipationRegistry.start(tmp_path, epochs)
    once = cases.make_mechanism(strategy, SingleParticipation())
    with ParticipationRegistry.start(tmp_path, once) as registry:
        assert (registry.min_separation, registry.max_participations) == (6, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("version", "2"), ("separation", "b = r2 - r1 - 1"), ("format", "x"), ("surprise", "1")],
)
def test_another_version_or_convention_is_refused(tmp_path, name, value):
    ParticipationRegistry.start(tmp_path / "r", make_mechanism()).close()
    with sqlite3.connect(tmp_path / "r" / "registry.sqlite") as file:
        file.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, value))
    with pytest.raises(RegistryError, match=name):
        ParticipationRegistry.start(tmp_path / "r", make_mechanism())


def test_a_lost_salt_or_database_is_refused_and_not_made_again(tmp_path):
    for name in ("participation_salt", "registry.sqlite"):
        folder = tmp_path / name
        ParticipationRegistry.start(folder, make_mechanism()).close()
        (folder / name).unlink()
        with pytest.raises(RegistryError, match=f"{name} is missing"):
            ParticipationRegistry.start(folder, make_mechanism())
        assert not (folder / name).exists()
    (tmp_path / "participation_salt" / "participation_salt").write_bytes(bytes(32))
    (tmp_path / "participation_salt" / "participation_salt").chmod(0o600)
    with pytest.raises(RegistryError, match="salt_id"):
        ParticipationRegistry.start(tmp_path / "participation_salt", make_mechanism())


def test_a_registry_that_was_put_back_refuses_the_next_round(tmp_path):
    with ParticipationRegistry.start(tmp_path / "r", make_mechanism()) as registry:
        registry.begin_round(0).count()
    before = (tmp_path / "r" / "registry.sqlite").read_bytes()
    with ParticipationRegistry.start(tmp_path / "r", make_mechanism()) as registry:
        registry.begin_round(1).count()
    (tmp_path / "r" / "registry.sqlite").write_bytes(before)
    with ParticipationRegistry.start(tmp_path / "r", make_mechanism()) as registry:
        _refused(registry.begin_round, 2)


def test_files_are_their_owners_only(tmp_path):
    folder = tmp_path / "r"
    registry = ParticipationRegistry.start(folder, make_mechanism())
    registry.begin_round(0).invite(CLIENTS)
    names = {path.name: path.stat().st_mode & 0o777 for path in [folder, *folder.iterdir()]}
    assert set(names.values()) == {0o700, 0o600}
    assert "registry.sqlite-wal" in names
    registry.close()
    (folder / "registry.sqlite").chmod(0o640)
    with pytest.raises(RegistryError, match="chmod 600"):
        ParticipationRegistry.start(folder, make_mechanism())
    folder.chmod(0o755)
    with pytest.raises(RegistryError, match="chmod 700"):
        ParticipationRegistry.start(folder, make_mechanism())


def test_names_of_clients_are_nowhere_in_the_files(tmp_path):
    with ParticipationRegistry.start(tmp_path, make_mechanism()) as registry:
        registry.begin_round(0).invite(["Ada Lovelace"])
        assert all(b"Lovelace" not in path.read_bytes() for path in tmp_path.iterdir())
    with pytest.raises(BandMFError, match="client id must be a string"):
        registry.pseudonym(7)


DAMAGE = {
    "empty": lambda data: b"",
    "text": lambda data: b"client,round\n",
    "cut": lambda data: data[: len(data) // 2],
    "page": lambda data: data[:4096] + b"\xa5" * 4096 + data[8192:],
    "leaf": lambda data: data[:-4096] + b"\xa5" * 4096,  # Nothing else reads it at the start.
    "pages": lambda data: data[:100] + bytes(len(data) - 100),
    "other": lambda data: data[:68] + b"\0\0\0\0" + data[72:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused(tmp_path, damage):
    with ParticipationRegistry.start(tmp_path, make_mechanism()) as registry:
        registry.begin_round(0).invite(f"client {number}" for number in range(500))
    path = tmp_path / "registry.sqlite"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    _refused(ParticipationRegistry.start, tmp_path, make_mechanism())


def test_clients_that_contradict_their_rounds_are_refused(tmp_path):
    with ParticipationRegistry.start(tmp_path, make_mechanism()) as registry:
        registry.begin_round(0).invite(CLIENTS)
        for change in ("last_round = NULL", "participations = 0", "last_round = 2"):
            with sqlite3.connect(tmp_path / "registry.sqlite") as file:
                file.execute(f"UPDATE clients SET last_round = 0, participations = 1, {change}")
            with pytest.raises(RegistryError, match="contradicts itself"):
                registry.join_round(0).invite(CLIENTS)


def test_on_a_full_disk_nobody_is_admitted_and_nobody_forgotten(tmp_path):
    with ParticipationRegistry.start(tmp_path, make_mechanism()) as registry:
        attempt = registry.begin_round(0)
        assert attempt.arrived(attempt.invite(CLIENTS[:2])) == CLIENTS[:2]
        attempt.invite(CLIENTS[2:3])
        many = [f"other {number}" for number in range(2000)]
        size = (tmp_path / "registry.sqlite-wal").stat().st_size
        for room in range(0, 40_000, 3_000):
            with cases.largest_file(size + room):
                _refused(attempt.invite, many)
        with cases.largest_file(size):
            _refused(attempt.arrived, CLIENTS[2:3])
            _refused(attempt.count)
        assert list(registry.eligible(0, many)) == many
        assert attempt.invite(CLIENTS) == CLIENTS[3:]
        assert attempt.count().round == 0


def test_on_a_full_disk_it_is_not_begun_until_there_is_room(tmp_path):
    for room in (0, 16, 1000, 20_000):
        with cases.largest_file(room):
            _refused(ParticipationRegistry.start, tmp_path / "r", make_mechanism())
    with ParticipationRegistry.start(tmp_path / "r", make_mechanism()) as registry:
        assert registry.begin_round(0).invite(CLIENTS) == CLIENTS


def test_a_file_that_was_replaced_in_use_is_refused(tmp_path):
    with ParticipationRegistry.start(tmp_path, make_mechanism()) as registry:
        attempt = registry.begin_round(0)
        registry.export(tmp_path.parent / "older.sqlite")
        attempt.arrived(attempt.invite(CLIENTS[:3]))
        os.replace(tmp_path.parent / "older.sqlite", tmp_path / "registry.sqlite")
        with pytest.raises(RegistryError, match="moved or replaced"):
            attempt.invite(CLIENTS)
        (tmp_path / "registry.sqlite").unlink()
        with pytest.raises(RegistryError, match="moved or replaced"):
            attempt.arrived(CLIENTS)


def test_a_pseudonym_is_no_client_of_its_own(start):
    """`eligible` yields pseudonyms of all whom it knows; invited so, nobody would be kept apart."""
    registry = start()
    registry.enroll(CLIENTS)
    attempt = registry.begin_round(0)
    with pytest.raises(RegistryError, match=r"invited by their ids.* count as another client"):
        attempt.invite(registry.eligible(0))
    assert attempt.invite(["ab" * 16], 1) == ["ab" * 16]  # An id that only looks like one.


def test_one_name_is_no_list_of_names_and_numbers_of_any_kind_are_rounds(start):
    attempt = start().begin_round(np.int64(0))
    for wrong in ("device", b"device", 7, None):
        with pytest.raises(BandMFError, match="client_ids must be several, in a list"):
            attempt.invite(wrong)
    assert start().join_round(np.int32(0)).invite(["device"]) == ["device"]
    with pytest.raises(BandMFError, match="must be an integer"):
        start().begin_round(0.0)


def test_without_psycopg_a_url_is_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(RegistryError, match=r"pip install 'psycopg\[binary\]'"):
        ParticipationRegistry.start(tmp_path, make_mechanism(), database="postgresql://host/x")
    with pytest.raises(RegistryError, match="begins with postgresql://"):
        ParticipationRegistry.start(tmp_path, make_mechanism(), database="mysql://u:secret@host/x")


@pytest.mark.parametrize(
    "url", ["u:my secret@host/x", "u:my@secret@host/x", "u:my%secret@host/x", "h/x?secret=1"]
)
def test_a_password_is_in_no_message(tmp_path, url):
    pytest.importorskip("psycopg", reason="psycopg is not installed.")
    with pytest.raises(RegistryError, match="must be a valid URL") as caught:
        ParticipationRegistry.start(tmp_path, make_mechanism(), database=f"postgresql://{url}")
    assert "secret" not in str(caught.value)


def test_a_fork_does_not_use_the_connection_of_its_parent(tmp_path):
    with ParticipationRegistry.start(tmp_path, make_mechanism()) as registry:
        registry.begin_round(0)
        child = os.fork()
        if child == 0:
            try:
                registry.join_round(0)
            except RegistryError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


def _apart(rounds):
    return all(
        later - earlier >= registry_program.MIN_SEPARATION
        for earlier, later in itertools.pairwise(sorted(rounds))
    )


def _check_world(outcomes):
    """Nobody was in sums too close or too often, and the registry knows of everybody in one."""
    for outcome in outcomes:
        world = outcome["world"]
        assert [n for what, n, _ in world if what == "released"] == list(
            range(registry_program.NUM_ROUNDS)
        )
        summed = collections.defaultdict(list)
        for what, number, clients in world:
            for client in clients if what == "summed" else ():
                summed[client].append(number)
        assert all(_apart(rounds) for rounds in summed.values())
        assert max(map(len, summed.values())) <= registry_program.MOST
        for client, rounds in summed.items():
            assert set(rounds) <= set(outcome["charged"][client])


def test_killed_before_any_statement_it_forgets_nobody(tmp_path):
    outcomes = registry_program.forked(tmp_path, "kill_at_statements")
    assert len(outcomes) > 60
    assert {outcome["before"] for outcome in outcomes} >= set(range(9))
    _check_world(outcomes)


def test_killed_in_the_midst_of_writing_it_forgets_nobody(tmp_path):
    outcomes = registry_program.forked(tmp_path, "kill_at_bytes", 5_000)
    assert len(outcomes) > 20
    _check_world(outcomes)


@pytest.mark.parametrize("database", BACKENDS, ids=["sqlite", "postgresql"])
def test_many_servers_at_once_admit_a_client_once(tmp_path, database):
    _emptied(database)
    found = registry_program.forked(tmp_path, "together", 4, 40, int(database is not None))
    rounds = collections.defaultdict(list)
    for client, number, summed in found:
        rounds[client].append((number, summed))
    assert len(rounds) == 40
    for entries in rounds.values():
        numbers = [number for number, _ in entries]
        assert len(set(numbers)) == len(numbers)
        assert _apart([number for number, summed in entries if summed])
        assert sum(summed for _, summed in entries) <= registry_program.MOST


def test_the_ledger_takes_the_record_of_a_round(start, tmp_path):
    registry = start()
    header = cases.ledger_header(
        mechanism_checksum=registry.mechanism_checksum,
        num_rounds=registry_program.NUM_ROUNDS,
        participation_recording="pseudonymous",
        salt_id=Pseudonyms.load(tmp_path / "registry" / "participation_salt").salt_id,
        clock="real",
        enforced_min_separation=registry.min_separation,
        enforced_max_participations=registry.max_participations,
    )
    with LedgerWriter.create(tmp_path / "ledger.jsonl", header) as ledger:
        for number in range(3):
            attempt = registry.begin_round(number)
            attempt.arrived(attempt.invite(CLIENTS, at_most=4)[1:])
            ledger.append(attempt.count().record(f"{number:064x}"))
    records = read_ledger(tmp_path / "ledger.jsonl").records
    assert [dict(record.flags) for record in records] == [{"dropped_clients": 1}] * 3
    assert records[0].participants == tuple(sorted(map(registry.pseudonym, CLIENTS[1:4])))


def test_in_the_secret_folder_of_a_run_its_ledger_has_the_same_pseudonyms(tmp_path):
    folder = tmp_path / "run"
    for number in range(3):  # The run and the registry are started again for each round.
        mechanism = run_program.make_mechanism(5)
        with ParticipationRegistry.start(folder / "secret", mechanism) as registry:
            attempt = registry.begin_round(number)
            came = attempt.arrived(attempt.invite(CLIENTS, at_most=3)[:2])
            with run_program.start(folder) as run:
                assert run.next_round == number
                counted = attempt.count()
                run.commit(run_program.result(number, client_ids=came, flags=counted.flags))
        record = read_ledger(folder / "ledger.jsonl").records[-1]
        assert record.participants == counted.participants
        assert dict(record.flags) == {"dropped_clients": 1}


def test_an_export_holds_all_of_it_in_one_closed_file(start, tmp_path):
    registry = start()
    attempt = registry.begin_round(0)
    attempt.arrived(attempt.invite(CLIENTS)[:3])
    attempt.count()
    registry.export(tmp_path / "copy.sqlite")
    assert (tmp_path / "copy.sqlite").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"registry", "copy.sqlite"}
    salt = tmp_path / "registry" / "participation_salt"
    charged = registry_program.charged(tmp_path / "copy.sqlite", salt)
    assert charged == {client: [0] for client in CLIENTS[:3]}
    _refused(registry.export, tmp_path / "copy.sqlite")
    _refused(registry.export, tmp_path / "nowhere" / "copy.sqlite")
