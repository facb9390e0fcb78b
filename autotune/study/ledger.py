"""The ledger of a study: records under content hashes, each computed once by the worker that claims it first.

Records are written atomically, so work is crash-safe: a worker that is killed leaves at most a claim that lapses, after
which another worker computes that record. Any number of processes can share a ledger; several hosts share it through a
database.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sql

from autotune.errors import UserError, reading
from autotune.files import content_key
from autotune.study.storage import NOW, storage_url

Record = dict[str, Any]
Report = Callable[[int, int], None]
"""Called with the number of finished units and the number of all units."""

LEASE_S = 60.0  # a claim that is not renewed lapses after this time
POLL_S = 0.2
RECENT = 4  # units of a stage whose longest duration is expected of the next one
HOST = content_key([socket.gethostname()])  # a ledger names no machine
REPAIR = "restore the storage or move it away, and run the same command to continue"


class Ledger:
    def __init__(self, storage: str | Path, *, lease_s: float = LEASE_S, must_exist: bool = False) -> None:
        """``must_exist`` refuses a storage without a ledger, which would be created.

        Raises:
            UserError: the storage does not answer, or its driver is not installed.
        """
        self.storage = storage
        self.name = str(storage) if isinstance(storage, Path) else f"--storage {storage}"
        """In messages."""
        self.lease_s = lease_s
        self._used: dict[str, dict[str, None]] = {}
        self._durations: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self.owner = f"{HOST}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._table = sql.Table(
            "autotune_ledger",
            sql.MetaData(),
            sql.Column("key", sql.String(64), primary_key=True),
            sql.Column("stage", sql.String(32), nullable=False),
            sql.Column("owner", sql.String(255), nullable=False),
            sql.Column("lapses", sql.Double, nullable=False),
            sql.Column("record", sql.Text, nullable=True),
        )
        try:
            url = storage_url(storage)
            wait = {"timeout": 60} if url.startswith("sqlite") else {"connect_timeout": 10}
            self._engine = sql.create_engine(url, connect_args=wait, pool_pre_ping=True)
            self._now: sql.ColumnElement[float] = sql.literal_column(NOW[self._engine.dialect.name])
            database = self._engine.url.database
            if must_exist and url.startswith("sqlite") and database and not Path(database).exists():
                raise UserError(f"{self.name}: no such file; check the path")
            if not must_exist:
                # Of two workers that start at the same time and find no table, one fails to create it.
                with contextlib.suppress(sql.exc.SQLAlchemyError):
                    self._table.create(self._engine, checkfirst=True)
                self._table.create(self._engine, checkfirst=True)
        except (sql.exc.SQLAlchemyError, ImportError, ValueError) as error:  # ValueError: the port is no number
            raise self._error(error) from None
        self.missing([""])

    def __reduce__(self) -> Any:
        """A copy in another process is another worker of the same storage."""
        return Ledger, (self.storage,)

    def _error(self, error: Exception) -> UserError:
        """An error of the storage in one line."""
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return UserError(
            f"{self.name}: the storage cannot be used ({reason}); check its path or URL, its driver and the free space, "
            f"or {REPAIR}"
        )

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Inside the context, records are read whose content another program may have changed."""
        return reading(f"{self.name}: a record is damaged", REPAIR)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Inside the context errors of the storage, as of a full disk, are one line; also Optuna's, which uses the same
        database.
        """
        try:
            yield
        except Exception as error:
            cause = error if isinstance(error, sql.exc.SQLAlchemyError) else error.__cause__
            if not isinstance(cause, sql.exc.SQLAlchemyError):
                raise
            raise self._error(cause) from None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sql.Connection]:
        """A connection whose changes are committed together."""
        with self._answering(), self._engine.begin() as connection:
            yield connection

    @property
    def used_keys(self) -> dict[str, list[str]]:
        """Keys of the records that this worker's calls of ``work`` returned, by stage."""
        return {stage: list(keys) for stage, keys in self._used.items()}

    def records(self, keys: list[str]) -> dict[str, Record]:
        """The finished records of these keys, in their order."""
        finished = dict(self._finished(keys, self._table.c.key, self._table.c.record))
        with self.reading():
            return {key: dict(json.loads(finished[key])) for key in keys if key in finished}

    def missing(self, keys: list[str]) -> list[str]:
        """The keys without a finished record."""
        finished = {key for (key,) in self._finished(keys, self._table.c.key)}
        return [key for key in keys if key not in finished]

    def _finished(self, keys: list[str], *columns: sql.Column[Any]) -> Iterator[Any]:
        """Rows of the finished records, 500 keys to a query."""
        table = self._table
        with self._transaction() as connection:
            for start in range(0, len(keys), 500):
                chosen = table.c.key.in_(keys[start : start + 500]) & table.c.record.is_not(None)
                yield from connection.execute(sql.select(*columns).where(chosen))

    def claim(self, key: str, stage: str) -> bool:
        """Try to claim a record for this worker; fails if it is finished, or claimed by another live worker."""
        from sqlalchemy.dialects import postgresql, sqlite

        table = self._table
        insert = postgresql.insert if self._engine.dialect.name == "postgresql" else sqlite.insert
        mine = {"owner": self.owner, "lapses": self._now + self.lease_s}
        with self._transaction() as connection:
            seen = connection.execute(sql.select(table.c.owner).where(table.c.key == key)).scalar()
            # Another host's clock may be ahead: a claim that lapses later than any lease is none.
            latest = self._now + 2 * max(self.lease_s, LEASE_S)
            is_free = (table.c.lapses < self._now) | (table.c.lapses > latest)
            if seen is not None and _is_dead(seen):
                is_free = is_free | (table.c.owner == seen)
            statement = insert(table).values(key=key, stage=stage, record=None, **mine)
            statement = statement.on_conflict_do_update(
                index_elements=["key"], set_=mine, where=table.c.record.is_(None) & is_free
            )
            return connection.execute(statement.returning(table.c.key)).first() is not None

    def put(self, key: str, record: Record) -> None:
        """Write a record that this worker has claimed. A finished record is never replaced, and names no worker."""
        table = self._table
        update = table.update().where(table.c.key == key, table.c.record.is_(None))
        with self._transaction() as connection:
            connection.execute(update.values(record=json.dumps(record, allow_nan=False), owner=""))

    def work(
        self,
        stage: str,
        units: Mapping[str, Callable[[], Record]],
        *,
        deadline: float | None = None,
        report: Report | None = None,
    ) -> dict[str, Record]:
        """Compute the missing records of ``units``, shared with all other workers of the ledger.

        Returns the records in the order of ``units``: all of them, unless the deadline (of ``time.monotonic``) is too
        near. No unit is begun that would end later: one is expected to take as long as the longest of the stage's
        ``RECENT`` latest here.
        """
        keys = list(units)
        while len(waiting := self.missing(keys)) > 0:
            if report is not None:
                report(len(keys) - len(waiting), len(keys))
            began, durations = time.monotonic(), self._durations[stage]
            if deadline is not None and began + max(durations, default=0.0) > deadline:
                break
            mine = next((key for key in waiting if self.claim(key, stage)), None)
            if mine is None:  # other workers have claimed the rest
                time.sleep(POLL_S)
                continue
            with self._answering(), self._held(mine):
                self.put(mine, units[mine]())
            durations.append(time.monotonic() - began)
        if report is not None:
            report(len(keys) - len(waiting), len(keys))
        finished = self.records(keys)
        self._used.setdefault(stage, {}).update(dict.fromkeys(finished))
        return finished

    @contextlib.contextmanager
    def turn(self, stage: str, say: Callable[[str], None], *, is_timed: bool = False) -> Iterator[None]:
        """Inside the context, no other worker of this host and ``--storage`` runs beside a timed stage; the stages that
        are not timed run beside each other.

        A stage waits for those that run when it arrives, and those that arrive later wait for it. The system ends the
        turn of a killed worker. A timed stage must not wait for records, which another worker may make in a turn.

        Args:
            say: prints the line of a stage that waits.
        """
        if sys.platform == "win32" or isinstance(
            self.storage, Path
        ):  # no fcntl there; a folder has one search at a time
            yield
            return
        import fcntl

        url = self._engine.url.set(password=None).difference_update_query(["password"])
        path = Path(tempfile.gettempdir()) / f"autotune-{content_key([str(url), os.getuid()])}"
        kind = fcntl.LOCK_EX if is_timed else fcntl.LOCK_SH
        with path.with_suffix(".turn").open("ab") as running:
            with path.with_suffix(".next").open("ab") as arriving:  # a stage that waits keeps later ones waiting
                try:
                    fcntl.flock(arriving, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    fcntl.flock(running, kind | fcntl.LOCK_NB)
                except BlockingIOError:
                    say(f"{stage}: waiting for other workers of this host, because what is timed runs alone")
                    fcntl.flock(arriving, fcntl.LOCK_EX)
                    fcntl.flock(running, kind)
            yield

    @contextlib.contextmanager
    def _held(self, key: str) -> Iterator[None]:
        """Renew a claim until the block ends, and release it if the block raises."""
        ended = threading.Event()
        table = self._table
        mine = (table.c.key == key) & (table.c.owner == self.owner)

        def renew() -> None:
            while not ended.wait(self.lease_s / 3):
                with contextlib.suppress(sql.exc.SQLAlchemyError), self._engine.begin() as connection:
                    connection.execute(table.update().where(mine).values(lapses=self._now + self.lease_s))

        renewer = threading.Thread(target=renew, daemon=True)
        renewer.start()
        try:
            yield
        except BaseException:
            with contextlib.suppress(sql.exc.SQLAlchemyError), self._engine.begin() as connection:
                connection.execute(table.delete().where(mine & table.c.record.is_(None)))
            raise
        finally:
            ended.set()
            renewer.join()


def _is_dead(owner: str) -> bool:
    """Whether a worker of this host has ended, so that its claims are free before they lapse."""
    host, pid, _ = (*owner.split(":"), "", "")[:3]
    return host == HOST and len(pid) < 10 and pid.isdecimal() and not psutil.pid_exists(int(pid))
