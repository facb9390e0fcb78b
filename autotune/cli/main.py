"""The command line: verbs in the order of the work, loaded when they are needed, and errors in one line."""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from autotune.documents.provenance import DISTRIBUTION, version_of
from autotune.errors import UserError, explained, masked, nearest

# Loggers of packages that transformers imports; they report on the packages' own state.
CHATTY = ("bitsandbytes", "torchao", "torch.utils._pytree", "huggingface_hub", "transformers.integrations.hub_kernels")
FAULT = 70  # the exit code of a fault of the program: EX_SOFTWARE of sysexits.h
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
VERBS = (
    *("doctor", "search", "run", "serve", "bench", "check", "diff"),
    *("report", "export", "push", "train", "measure", "record"),
)
CONTINUED = ("measure", "record", "search", "train")
"""Verbs that keep the work of an interrupted run, with which the same command continues."""
SHARDED = ("search", "run", "serve", "bench", "check", "measure", "record")
"""Verbs that several processes of torchrun run together, each with a part of the target."""


class Commands(click.Group):
    """Imports a verb's module when the verb is used, and prints mistakes of the user as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            raise click.UsageError(f"no such command {cmd_name!r}; {nearest(cmd_name, VERBS)}")
        command: click.Command = importlib.import_module(f"autotune.cli.{cmd_name}").command
        command.name = cmd_name
        return command

    def main(self, args: Sequence[str] | None = None, *_: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.ERROR)
        if not standalone_mode:  # the caller handles exceptions
            return super().main(args, prog_name="autotune", standalone_mode=False)
        _open_closed_streams()
        _end_by_signals()
        warnings.formatwarning = _in_one_line
        verb = next((word for word in (sys.argv[1:] if args is None else args) if word in VERBS), "")
        try:
            if verb in SHARDED and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
                _join_ranks()
            sys.exit(super().main(args, prog_name="autotune", standalone_mode=False) or 0)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt) as abort:
            _say("interrupted; run the same command to continue" if verb in CONTINUED else "interrupted")
            interrupt = abort.__cause__ or abort
            sys.exit(128 + (interrupt.args[0] if interrupt.args else signal.SIGINT))
        except Exception as error:
            _end(explained(error))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:  # click would exit with 1, which is a regression
            _drop_output()
            raise click.exceptions.Exit(128 + signal.SIGPIPE) from None


def _join_ranks() -> None:
    """Run the verb together with the other processes of torchrun. Those that follow end at a signal, without a word."""
    if os.environ.get("RANK", "0") != "0":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
    importlib.import_module("autotune.modeling.sharded").lead_or_follow()


def _in_one_line(message: Warning | str, *_: Any, **__: Any) -> str:
    """A warning without the file and the line of code that raised it."""
    return f"autotune: {masked(' '.join(str(message).split()))}\n"


def _say(message: str) -> None:
    """Print a line on standard error, unless its reader has gone."""
    try:
        click.echo(f"autotune: {masked(message)}", err=True)
    except BrokenPipeError:
        _drop_output()


def _end(error: Exception) -> NoReturn:
    """Exit after an error with the line that says what the user can do; without one it is a fault of the program, which
    prints its traceback.
    """
    line, code = _line_of(error), getattr(error, "exit_code", UserError.exit_code)
    if line is None:
        with contextlib.suppress(BrokenPipeError):
            traceback.print_exception(error)
        name, code = type(error).__name__, FAULT
        line = f"a fault of the program, {name}; please report it with the lines above and the command"
    _say(line)
    sys.exit(code)


def _line_of(error: Exception) -> str | None:
    """The line for an error that the user can end."""
    if (sharing := sys.modules.get("autotune.modeling.ranks")) is not None and (line := sharing.failure(error)):
        return str(line)
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, click.UsageError):
        return " ".join(error.format_message().split())  # click may list choices line by line
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return (
            f"{error.filename or 'a file'}: cannot be read or written ({error.strerror}); free some space, or check its "
            "permissions"
        )
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # the latter is torch's
        reason = " ".join(str(error).split())[:200] or "no more can be allocated"
        return f"the memory is full ({reason}); end other programs, or give a smaller model, shorter prompts or another device"
    return None


def _drop_output() -> None:
    """Write what is still buffered nowhere."""
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _end_by_signals() -> None:
    """Let SIGTERM and SIGHUP end the command as SIGINT does, by an interrupt with their number. A caller that ignores
    one of them, as nohup, is obeyed.
    """

    def end(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(number)

    for number in (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")):
        is_main = threading.current_thread() is threading.main_thread()
        if number is not None and is_main and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)


def _open_closed_streams() -> None:
    """Open the standard streams that the caller has closed (``2>&-``), or the files of a command would get their
    descriptors.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(version_of(DISTRIBUTION), prog_name="autotune")
def main() -> None:
    """Fit speculative decoding to a model, a workload and a device, and decode with the result.

    Without options every command uses the bundled models and workload, offline.

    Exit codes: 0 done, 1 the check found a regression or the doctor a defect, 2 a mistake that the user can fix, 3 the
    check is inconclusive, 4 not comparable, 70 a fault of the program, with a traceback; 129, 130 and 143 ended by
    SIGHUP, SIGINT or SIGTERM, 141 by the reader of its output.
    """
