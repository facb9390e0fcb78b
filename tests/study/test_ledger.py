"""The ledger: every record is made once, by one of its workers, whatever is killed and whenever."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.study.ledger import Ledger

# A worker over units 0 to the last argument; each notes on disk that it was begun.
WORKER = """
import sys, time
from pathlib import Path
from autotune.study.ledger import Ledger
storage, begun, count, seconds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])

def unit(number):
    def make():
        with begun.open("a") as file:
            file.write(f"{number}\\n")
        time.sleep(seconds)
        return {"square": number**2}
    return make

ledger = Ledger(Path(storage) if "://" not in storage else storage)
print("begins", flush=True)
ledger.work("squares", {f"unit-{number}": unit(number) for number in range(count)})
"""


def start(storage: str | Path, begun: Path, count: int, seconds: float) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(storage), str(begun), str(count), str(seconds)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()  # it has loaded
    return process


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


def test_work_makes_what_is_missing_and_nothing_twice(storage: str | Path) -> None:
    made = []

    def unit(number: int) -> dict[str, int]:
        made.append(number)
        return {"square": number**2}

    units = {f"unit-{number}": lambda number=number: unit(number) for number in (2, 3, 5)}
    first = Ledger(storage).work("squares", dict(itertools.islice(units.items(), 2)))
    records = Ledger(storage).work("squares", units)
    assert made == [2, 3, 5]
    assert records == {"unit-2": {"square": 4}, "unit-3": {"square": 9}, "unit-5": {"square": 25}}
    assert first == {"unit-2": {"square": 4}, "unit-3": {"square": 9}}
    assert Ledger(storage).records(["unit-5", "unit-7"]) == {"unit-5": {"square": 25}}


def test_twenty_kills_lose_no_record_and_repeat_none(tmp_path: Path) -> None:
    storage, begun = tmp_path / "ledger.sqlite", tmp_path / "begun"
    keys = [f"unit-{number}" for number in range(200)]
    order = random.Random(0)
    seen, repeated = 0, []
    for _ in range(20):
        finished = set(keys) - set(Ledger(storage).missing(keys))
        process = start(storage, begun, 200, 0.004)
        until = seen + order.randint(2, 9)
        while not begun.exists() or begun.read_text().count("\n") < until:
            time.sleep(0.001)
        time.sleep(order.uniform(0.0, 0.02))
        process.send_signal(signal.SIGKILL)
        process.wait()
        lines = begun.read_text().split() if begun.exists() else []
        repeated += [number for number in lines[seen:] if f"unit-{number}" in finished]
        seen = len(lines)
    assert 0 < len(Ledger(storage).missing(keys)) < 200, "the kills show nothing"
    process = start(storage, begun, 200, 0.0)
    assert process.wait(60) == 0
    records = Ledger(storage).records(keys)
    assert list(records) == keys and all(records[f"unit-{n}"] == {"square": n**2} for n in range(200))
    assert repeated == []


def test_two_workers_share_the_work(storage: str | Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    workers = [start(storage, begun, 30, 0.03) for _ in range(2)]
    assert [worker.wait(60) for worker in workers] == [0, 0]
    assert sorted(map(int, begun.read_text().split())) == list(range(30))


def test_what_another_worker_is_at_is_left_to_it_until_it_dies_or_falls_silent(storage: str | Path) -> None:
    one, other = Ledger(storage, lease_s=0.3), Ledger(storage)
    assert one.claim("unit-1", "squares") and not other.claim("unit-1", "squares")
    time.sleep(0.4)  # one has not renewed its claim
    assert other.claim("unit-1", "squares")
    assert not one.claim("unit-1", "squares")


def test_a_claim_of_a_dead_process_of_this_host_is_free_at_once(storage: str | Path, tmp_path: Path) -> None:
    process = start(storage, tmp_path / "begun", 1, 60.0)
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    assert not Ledger(storage).claim("unit-0", "squares")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert Ledger(storage).claim("unit-0", "squares")


def test_long_units_keep_their_claim(storage: str | Path) -> None:
    one = Ledger(storage, lease_s=0.3)

    def make() -> dict[str, bool]:
        time.sleep(0.7)
        return {"was_free": Ledger(storage).claim("unit-1", "squares")}

    assert one.work("squares", {"unit-1": make}) == {"unit-1": {"was_free": False}}


def test_a_unit_that_fails_is_free_again(storage: str | Path) -> None:
    def fail() -> dict[str, int]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Ledger(storage).work("squares", {"unit-1": fail})
    assert Ledger(storage).work("squares", {"unit-1": lambda: {"square": 1}}) == {"unit-1": {"square": 1}}


def test_a_deadline_ends_the_work_with_what_there_is(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    units = {f"unit-{number}": lambda: (time.sleep(0.1), {"done": True})[1] for number in range(50)}
    records = ledger.work("slow", units, deadline=time.monotonic() + 0.25)
    assert 1 <= len(records) < 50 and list(records) == list(units)[: len(records)]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://nobody@127.0.0.1:1/none", "does not answer"),
        ("mysql://root@localhost/none", "PostgreSQL or a SQLite file"),
        ("nonsense", "PostgreSQL or a SQLite file"),
    ],
)
def test_storage_that_does_not_answer_is_one_clear_line(url: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        Ledger(url)
    assert "\n" not in str(caught.value) and url in str(caught.value)
