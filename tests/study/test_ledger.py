"""The ledger: workers share units, compute every record once, and lose none when they are killed."""

from __future__ import annotations

import itertools
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy

from autotune.errors import UserError
from autotune.study import ledger as module
from autotune.study.ledger import LEASE_S, Ledger
from autotune.study.storage import optuna_storage

# A worker process: appends the number of each unit that it starts to a file.
WORKER = """
import sys, time
from pathlib import Path
from autotune.study.ledger import Ledger
storage, started, count, seconds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])

def unit(number):
    def make():
        with started.open("a") as file:
            file.write(f"{number}\\n")
        time.sleep(seconds)
        return {"square": number**2}
    return make

ledger = Ledger(Path(storage) if "://" not in storage else storage)
print("ready", flush=True)
ledger.work("squares", {f"unit-{number}": unit(number) for number in range(count)})
"""

# A worker process: writes what happens to its stage to its output, and ends the stage when its input ends.
TURN = """
import sys
from autotune.study.ledger import Ledger
storage, stage = sys.argv[1:]

with Ledger(storage).turn(stage, lambda text: print("waits", flush=True), is_timed=stage == "timed"):
    print("begins", flush=True)
    sys.stdin.read()
"""


def start(storage: str | Path, started: Path, count: int, seconds: float) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(storage), str(started), str(count), str(seconds)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()  # "ready"
    return process


def set_clock(seconds: float, *ledgers: Ledger) -> None:
    """Set the database's clock for some ledgers."""
    for ledger in ledgers:
        ledger._now = sqlalchemy.literal_column(f"{seconds}")


@pytest.fixture(params=["file", "postgresql"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    if request.param == "file":
        return tmp_path / "ledger.sqlite"
    url: str = request.getfixturevalue("postgresql")
    Ledger(url)
    import sqlalchemy

    from autotune.study.storage import storage_url

    with sqlalchemy.create_engine(storage_url(url)).begin() as connection:
        connection.execute(sqlalchemy.text("delete from autotune_ledger"))
    return url


def test_only_missing_records_are_computed(storage: str | Path) -> None:
    computed = []

    def unit(number: int) -> dict[str, int]:
        computed.append(number)
        return {"square": number**2}

    units = {f"unit-{number}": lambda number=number: unit(number) for number in (2, 3, 5)}
    first = Ledger(storage).work("squares", dict(itertools.islice(units.items(), 2)))
    records = Ledger(storage).work("squares", units)
    assert computed == [2, 3, 5]
    assert records == {"unit-2": {"square": 4}, "unit-3": {"square": 9}, "unit-5": {"square": 25}}
    assert first == {"unit-2": {"square": 4}, "unit-3": {"square": 9}}
    assert Ledger(storage).records(["unit-5", "unit-7"]) == {"unit-5": {"square": 25}}


@pytest.mark.parametrize("kills", [6, pytest.param(20, marks=pytest.mark.nightly)])
def test_kills_lose_no_record_and_repeat_none(kills: int, tmp_path: Path) -> None:
    storage, started = tmp_path / "ledger.sqlite", tmp_path / "started"
    keys = [f"unit-{number}" for number in range(200)]
    order = random.Random(0)
    seen, repeated = 0, []
    for _ in range(kills):
        finished = set(keys) - set(Ledger(storage).missing(keys))
        process = start(storage, started, 200, 0.01)
        until = seen + order.randint(2, 9)
        while process.poll() is None and (not started.exists() or started.read_text().count("\n") < until):
            time.sleep(0.001)
        time.sleep(order.uniform(0.0, 0.02))
        process.send_signal(signal.SIGKILL)
        process.wait()
        lines = started.read_text().split() if started.exists() else []
        repeated += [number for number in lines[seen:] if f"unit-{number}" in finished]
        seen = len(lines)
    assert 0 < len(Ledger(storage).missing(keys)) < 200, "no unit was interrupted: the test proves nothing"
    process = start(storage, started, 200, 0.0)
    assert process.wait(600) == 0
    records = Ledger(storage).records(keys)
    assert list(records) == keys and all(records[f"unit-{n}"] == {"square": n**2} for n in range(200))
    assert repeated == []


def test_a_claim_lapses_if_it_is_not_renewed(storage: str | Path) -> None:
    one, other = Ledger(storage), Ledger(storage)
    set_clock(1000.0, one, other)
    assert one.claim("unit-1", "squares") and not other.claim("unit-1", "squares")
    set_clock(1001.0 + LEASE_S, one, other)
    assert other.claim("unit-1", "squares")
    assert not one.claim("unit-1", "squares")


def test_a_claim_of_an_ended_process_of_this_host_is_free_at_once(storage: str | Path, tmp_path: Path) -> None:
    process = start(storage, tmp_path / "started", 1, 3600.0)
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    assert not Ledger(storage).claim("unit-0", "squares")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert Ledger(storage).claim("unit-0", "squares")


def test_long_units_keep_their_claim(storage: str | Path) -> None:
    """The claim, which lapses after 0.3 s, is renewed a thousand times that later."""
    one, other = Ledger(storage, lease_s=0.3), Ledger(storage)
    set_clock(1000.0, one)

    def lapses() -> float:
        with other._engine.begin() as connection:
            return float(connection.execute(sqlalchemy.select(other._table.c.lapses)).scalar_one())

    def make() -> dict[str, bool]:
        set_clock(1300.0, one, other)
        while lapses() < 1300.0:
            time.sleep(0.01)
        return {"was_free": other.claim("unit-1", "squares")}

    assert one.work("squares", {"unit-1": make}) == {"unit-1": {"was_free": False}}


def test_a_unit_that_fails_is_free_again(storage: str | Path) -> None:
    def fail() -> dict[str, int]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Ledger(storage).work("squares", {"unit-1": fail})
    assert Ledger(storage).work("squares", {"unit-1": lambda: {"square": 1}}) == {"unit-1": {"square": 1}}


def test_no_unit_is_begun_that_would_end_after_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest of the stage's latest units decides, in later calls too; other stages have their own."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=time.sleep)
    monkeypatch.setattr(module, "time", clock)
    ledger = Ledger(tmp_path / "ledger.sqlite")

    def unit(seconds: float) -> Callable[[], dict[str, float]]:
        return lambda: {"ended": setattr(clock, "now", clock.now + seconds) or clock.now}  # type: ignore[func-returns-value]

    first = ledger.work("long", {"a": unit(1.0), "b": unit(20.0), "c": unit(20.0), "d": unit(1.0)}, deadline=50.0)
    assert list(first) == ["a", "b", "c"]
    assert [record["ended"] for record in first.values()] == [1.0, 21.0, 41.0], "the fourth might take 20 s as well"
    assert ledger.work("long", {"e": unit(1.0)}, deadline=50.0) == {}
    assert ledger.work("other", {"f": unit(1.0)}, deadline=50.0) == {"f": {"ended": 42.0}}
    assert len(ledger.work("long", {str(n): unit(1.0) for n in range(4)}, deadline=80.0)) == 4
    assert ledger.work("long", {"e": unit(1.0)}, deadline=50.0) == {"e": {"ended": 47.0}}, "20 s are long ago"


class Stage:
    """A stage in a process of its own."""

    def __init__(self, storage: str, stage: str) -> None:
        command = [sys.executable, "-c", TURN, storage, stage]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def event(self) -> str:
        """The next event, which has happened or will."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def has_event(self, within_s: float) -> bool:
        return select.select([self.process.stdout], [], [], within_s)[0] != []

    def end(self, *, is_killed: bool = False) -> None:
        if is_killed:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def urls(storage: str | Path) -> tuple[str, str]:
    """Two ledgers of one storage, with and without a password where it has users."""
    return (f"sqlite:///{storage}",) * 2 if isinstance(storage, Path) else (storage, f"{storage}&password=secret")


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_worker_that_is_timed_runs_alone_on_its_host(urls: tuple[str, str], is_killed: bool) -> None:
    """Stages that compute run together, but not past a timed one that waits; an ended or killed one is not waited
    for.
    """
    first, second = (Stage(url, "traces") for url in urls)
    assert (first.event(), second.event()) == ("begins", "begins")
    timed = Stage(urls[0], "timed")
    assert timed.event() == "waits"
    late = Stage(urls[1], "traces")
    assert late.event() == "waits", "the timed stage has come before"
    first.end(is_killed=is_killed)
    assert not timed.has_event(0.2)
    second.end(is_killed=is_killed)
    assert timed.event() == "begins" and not late.has_event(0.2)
    timed.end(is_killed=is_killed)
    assert late.event() == "begins"
    late.end()


def test_storages_and_folders_have_turns_of_their_own(tmp_path: Path) -> None:
    """A folder's ledger has none."""
    timed = Stage(f"sqlite:///{tmp_path / 'a'}", "timed")
    assert timed.event() == "begins"
    said: list[str] = []
    for storage in (f"sqlite:///{tmp_path / 'b'}", tmp_path / "a"):
        with Ledger(storage).turn("timed", said.append, is_timed=True):
            assert said == []
    timed.end()


def test_storage_that_does_not_answer_is_one_clear_line() -> None:
    for url, message in (
        ("postgresql://nobody@127.0.0.1:1/none", "the storage cannot be used"),
        ("mysql://root@localhost/none", "PostgreSQL or a SQLite file"),
        ("nonsense", "PostgreSQL or a SQLite file"),
        ("postgresql://nobody@host:port/none", "cannot be used .invalid literal for int"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            Ledger(url)
        assert "\n" not in str(caught.value) and url in str(caught.value)


def test_passwords_are_not_printed() -> None:
    """By any message, whoever formats it."""
    for url in (
        "postgresql://u:SECRET@127.0.0.1:1/x",
        "postgresql://u:SE@C/RET@127.0.0.1:1/x",
        "postgresql://127.0.0.1:1/x?user=u&password=SECRET",
        "mysql://u:SECRET@localhost/x",
        "postgresql://u:SECRET@host:port/x",
    ):
        with pytest.raises(UserError) as caught:
            Ledger(url)
        assert "RET" not in str(caught.value) and "***" in str(caught.value), caught.value
    error = UserError("hf://datasets/a/b/c@d: port 1:2@3, http://h:8000/x")
    assert str(error) == "hf://datasets/a/b/c@d: port 1:2@3, http://h:8000/x"


def test_a_storage_that_is_only_read_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"typo.db: no such file; check the path"):
        Ledger(f"sqlite:///{tmp_path / 'typo.db'}", must_exist=True)
    assert not any(tmp_path.iterdir())
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    Ledger(url).work("squares", {"a": lambda: {"square": 1}})
    assert Ledger(url, must_exist=True).records(["a"]) == {"a": {"square": 1}}


def test_a_claim_of_a_clock_that_is_ahead_is_free(storage: str | Path) -> None:
    assert Ledger(storage, lease_s=86400.0).claim("unit-0", "squares")
    assert Ledger(storage).claim("unit-0", "squares"), "it would be waited for all day"
    assert not Ledger(storage).claim("unit-0", "squares")


def test_a_damaged_ledger_and_a_full_disk_are_one_line(tmp_path: Path) -> None:
    ledger = Ledger(path := tmp_path / "ledger.sqlite")
    with ledger._engine.begin() as connection:
        connection.exec_driver_sql("pragma max_page_count = 3")  # of the connection, which the ledger keeps
    assert ledger.claim("a", "squares")
    with pytest.raises(UserError, match=r"sqlite: the storage cannot be used .*is full.*; check .*the free space"):
        ledger.put("a", {"text": "x" * 100_000})
    Ledger(path).put("a", {"text": "x" * 100_000})
    path.write_bytes(b"not a database" * 100)
    for use in (lambda: ledger.claim("a", "squares"), lambda: ledger.records(["a"]), lambda: Ledger(path)):
        with pytest.raises(
            UserError, match=r"^\S+ledger.sqlite: the storage cannot be used .*; .* restore the storage"
        ):
            use()


@pytest.mark.parametrize("text", ["{", "5", "[1]", "null", '"x"', None, b"\xff"])
def test_a_damaged_record_is_one_line(text: object, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.work("squares", {"a": lambda: {"square": 1}})
    with ledger._engine.begin() as connection:
        connection.exec_driver_sql("update autotune_ledger set record = ?", (text,))
    if text is None:
        assert ledger.records(["a"]) == {}
        return
    with pytest.raises(UserError, match=r"ledger.sqlite: a record is damaged .*; restore the storage or move it away"):
        ledger.records(["a"])


@pytest.mark.parametrize("owner", ["", "x", "HOST:x:y", f"HOST:{10**30}:y", "HOST:-1", ":::"])
def test_a_damaged_owner_is_one_that_lives(owner: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.claim("a", "squares")
    with ledger._engine.begin() as connection:
        connection.exec_driver_sql("update autotune_ledger set owner = ?", (owner.replace("HOST", module.HOST),))
    assert not Ledger(tmp_path / "ledger.sqlite").claim("a", "squares")


def test_a_ledger_names_no_machine(tmp_path: Path) -> None:
    """The record of a finished unit names no process either."""
    path = tmp_path / "ledger.sqlite"
    assert Ledger(path).claim("a", "squares")
    assert socket.gethostname().encode() not in path.read_bytes()
    (ledger := Ledger(path)).work("squares", {"b": lambda: {"square": 1}})
    with ledger._engine.begin() as connection:
        owners = dict(connection.exec_driver_sql("select key, owner from autotune_ledger").tuples().all())
    assert owners["b"] == "" and str(os.getpid()) in owners["a"]


def test_a_storage_that_is_lost_during_the_work_is_one_line(tmp_path: Path) -> None:
    """Its file, or the database while Optuna writes its trials."""
    ledger = Ledger(path := tmp_path / "ledger.sqlite")

    def lose_file() -> dict[str, int]:
        path.unlink()
        return {"square": 1}

    def lose_optuna() -> dict[str, int]:
        raise RuntimeError("during the commit") from sqlalchemy.exc.OperationalError("insert", {}, Exception("gone"))

    with pytest.raises(UserError, match=r"the storage cannot be used .*gone.*; .*run the same command to continue"):
        ledger.work("squares", {"b": lose_optuna})
    with pytest.raises(UserError, match=r"the storage cannot be used .*; .* run the same command to continue"):
        ledger.work("squares", {"a": lose_file})


def test_a_clock_that_is_set_during_the_work_loses_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at it is a day early, right or a day late. Two workers may compute a record twice; the first
    one stays.
    """
    monkeypatch.setitem(module.NOW, "sqlite", f"{module.NOW['sqlite']} + (random() % 2) * 86400.0")
    units = {f"unit-{number}": lambda number=number: {"square": number**2} for number in range(40)}
    ledgers = [Ledger(tmp_path / "ledger.sqlite") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda ledger: ledger.work("squares", units), ledgers))
    assert found[0] == found[1] == {key: unit() for key, unit in units.items()}


def test_an_incomplete_line_of_the_journal_is_cut_before_another_is_added(tmp_path: Path) -> None:
    """As a full disk leaves it; and the lock of a killed process lapses."""
    optuna = pytest.importorskip("optuna")
    path = tmp_path / "ledger.sqlite"

    def add() -> None:
        study = optuna.create_study(study_name="s", storage=optuna_storage(path, to_append=True), load_if_exists=True)
        study.add_trial(optuna.trial.create_trial(value=1.0))

    add()
    with path.with_suffix(".optuna").open("ab") as file:
        file.write(b'{"op_code": 4, "stu')
    assert len(optuna.load_study(study_name="s", storage=optuna_storage(path)).trials) == 1
    add()
    assert len(optuna.load_study(study_name="s", storage=optuna_storage(path)).trials) == 2


def test_the_lock_of_the_journal_names_its_file_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna waits for ever for a lock whose file it does not find."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study").mkdir()
    lock = optuna_storage(Path("study/ledger.sqlite"), to_append=True)._backend._lock
    lock.acquire()
    assert Path(lock._lock_file).resolve() == tmp_path / "study" / "ledger.optuna"
    lock.release()
