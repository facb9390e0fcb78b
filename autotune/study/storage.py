"""Folders and files of studies, and URLs of their databases. Importing this module does not load sqlalchemy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.errors import UserError

STUDY, PROFILE, RUNS, LEDGER = "study.json", "profile.json", "runs.jsonl", "ledger.sqlite"
"""Files in a study folder. The first two have the key of their search before the suffix."""
# The current time in seconds since 1970, as each kind of database computes it.
NOW = {"sqlite": "(julianday('now') - 2440587.5) * 86400.0", "postgresql": "extract(epoch from clock_timestamp())"}


def study_folder(study: str, *roots: Path) -> Path:
    """The folder that ``--study`` names: a path, which has a slash, or a name in the first of ``roots`` that has it."""
    folders = [Path(study)] if "/" in study else [root / study for root in roots]
    return next((folder for folder in folders if folder.is_dir()), folders[0])


def storage_url(storage: str | Path) -> str:
    """The SQLAlchemy URL of a file (as SQLite) or of a database; PostgreSQL uses psycopg unless the URL names a driver.

    Raises:
        UserError: the URL names another kind of database.
    """
    if isinstance(storage, Path):
        storage.parent.mkdir(parents=True, exist_ok=True)
        return f"sqlite:///{storage}"
    url = storage.replace("postgresql://", "postgresql+psycopg://", 1)
    if url.split(":")[0].split("+")[0] not in NOW:
        raise UserError(
            f"--storage {storage}: a study is shared through PostgreSQL or a SQLite file; "
            "give postgresql://USER@HOST/DATABASE"
        )
    return url


def optuna_storage(ledger: str | Path, *, to_append: bool = False) -> Any:
    """Optuna's storage for a ledger: a journal file next to the ledger's file, or the same database."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    if not isinstance(ledger, Path):
        return storage_url(ledger)
    # Next to a relative path, the lock of a killed process would never lapse.
    path = ledger.with_suffix(".optuna").absolute()
    lock = JournalFileSymlinkLock(str(path))
    if to_append:  # a full disk may have left an incomplete last line
        lock.acquire()
        try:
            with path.open("ab+") as file:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        finally:
            lock.release()
    return JournalStorage(JournalFileBackend(str(path), lock))
