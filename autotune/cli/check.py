"""``autotune check``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from autotune.check.settings import CheckSettings
from autotune.cli import options
from autotune.cli.verb import Verb
from autotune.documents.option_fields import make_settings
from autotune.errors import UserError
from autotune.files import write_errors
from autotune.study.outputs import require_replaceable


@contextmanager
def reported_errors(junit: Path | None, github: bool) -> Iterator[None]:
    """Report an error that ends a check, and raise it again. The report of an earlier check is removed first, so that
    it does not stand for a check that was killed.
    """
    if junit is not None:
        require_replaceable(junit, "--junit")
        with write_errors(junit):
            junit.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        if junit is not None or github:
            from autotune.check.output import report_error

            with suppress(UserError):  # a report that cannot be written does not hide the error
                report_error(error, junit, github)
        raise


@click.command(cls=Verb, short_help="Check that a profile is still lossless and as fast as before.")
@click.argument("profile", type=click.Path(path_type=Path))
@options.settings_options(CheckSettings)
@options.chat_template_kwargs
@options.device_map
@options.shard_draft
@options.engine_command
@options.as_json
def command(as_json: bool, **values: Any) -> None:
    """Check that a profile is still lossless, that its counts are unchanged, and that it is not significantly slower.

    Exit codes: 0 passed, 1 regressed, 2 a mistake that the user can fix, 3 inconclusive, 4 not comparable,
    70 a fault of the program.
    """
    from autotune.cli.preflight import require_profile, require_workload
    from autotune.modeling.hub import profile_file

    with reported_errors(values["junit"], values["github"]):
        settings = make_settings(CheckSettings, values | {"profile": profile_file(values["profile"])})
        settings.require_consistent()
        require_profile(settings.profile)
        for workload in settings.workloads:
            require_workload(workload, settings.workload_format)

        click.echo(f"checking {settings.profile}", err=True)

        from autotune.check.job import run_check
        from autotune.check.output import github_annotations
        from autotune.console import Console
        from autotune.search.backends import restored_backend

        result = run_check(settings, Console(), restored_backend)
    if settings.github:
        for line in github_annotations(result):
            click.echo(line, err=True)
    if as_json:
        click.echo(result.dump())
    sys.exit(result.exit_code)
