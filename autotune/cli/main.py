"""The command line: verbs in the order of the work, loaded when they are needed, and errors in one line."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from typing import Any

import click

from autotune.documents.provenance import DISTRIBUTION, version_of
from autotune.errors import UserError, nearest

# Loggers of packages that transformers imports; they report on the packages' own state.
CHATTY = ("bitsandbytes", "torchao", "torch.utils._pytree")
VERBS = ("doctor", "measure", "record", "search", "run", "bench", "bench-server", "check", "report", "export", "train")
UNLISTED = {"profile": "measure", "devices": "devices"}  # names of an earlier README, for one version


class Commands(click.Group):
    """Imports a verb's module when the verb is used, and prints mistakes of the user as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = UNLISTED.get(cmd_name, cmd_name)
        if cmd_name not in (*VERBS, *UNLISTED):
            return None
        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.ERROR)
        command: click.Command = importlib.import_module(f"autotune.cli.{cmd_name.replace('-', '_')}").command
        command.name = cmd_name
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in (*VERBS, *UNLISTED) and not args[0].startswith("-"):
            raise click.UsageError(f"no such command {args[0]!r}; {nearest(args[0], VERBS)}")
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, *_: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:  # the caller handles exceptions
            return super().main(args, prog_name="autotune", standalone_mode=False)
        try:
            code = super().main(args, prog_name="autotune", standalone_mode=False)
        except (UserError, click.UsageError) as error:
            message = str(error)
            if isinstance(error, click.UsageError):  # click may list choices line by line
                message = " ".join(error.format_message().split())
            click.echo(f"autotune: {message}", err=True)
            sys.exit(error.exit_code)
        except click.Abort:
            click.echo("autotune: interrupted; run the same command to continue", err=True)
            sys.exit(130)
        sys.exit(code or 0)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(version_of(DISTRIBUTION), prog_name="autotune")
def main() -> None:
    """Fit speculative decoding to a model, a workload and a device, and decode with the result.

    Without options every command uses the bundled models and workload, offline.

    Exit codes: 0 done, 1 the check found a regression or the doctor a defect, 2 a mistake that the user can fix, 3 the check is inconclusive,
    4 not comparable.
    """
