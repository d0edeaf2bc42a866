"""The frame of every command: how errors end, where output goes, and how asynchronous work is run.

Output goes to standard output and is all that a script reads; progress and errors go to standard error. Exit statuses:
1 is a negative answer (nothing found, differences found, declined); 2 is a mistake of the caller, in one line; 3 is a
request that failed, with its reason and message; 4 is done, with something left to do. Only a bug shows a traceback.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections import UserDict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

import click

from tao.cli.extras import missing_module_text
from tao.cli.options import given
from tao.model.errors import OperatorError, RequestError, TaoError
from tao.terminal import print_json

DECLINED_STATUS = 1
OPERATOR_STATUS = 2
FAILED_STATUS = 3
INCOMPLETE_STATUS = 4
INTERRUPTED_STATUS = 130
_UNCUT_CHARACTERS = 1_000
_OPTIONS_ANYWHERE = frozenset({"--connect", "--state-dir", "--json"})
"""Options of the program that its commands have as well, where they mean something."""
_Result = TypeVar("_Result")


class Entry(NamedTuple):
    """A command that is imported when it is used: the module of `tao.cli` that defines it, and its help in short."""

    module: str
    summary: str


class _Commands(UserDict[str, click.Command]):
    """Commands by name. Each is imported when it is looked up; until then a stub has its help in short."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._modules = {name: entry.module for name, entry in entries.items()}
        super().__init__(
            {
                name: click.Command(name, short_help=entry.summary, hidden=not entry.summary)
                for name, entry in entries.items()
            }
        )

    def __getitem__(self, name: str) -> click.Command:
        if name in self._modules:
            module = vars(import_module(f"tao.cli.{self._modules[name]}"))
            self.data[name] = module.get(f"{name}_") or module[name]  # `list` is a built-in name
            del self._modules[name]
        return self.data[name]


class CommandGroup(click.Group):
    """A group of commands. Its help wraps the first sentence of each command's help, which click would cut off."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(_UNCUT_CHARACTERS))
                    for name, command in commands.items()
                    if command is not None and not command.hidden
                ]
            )


class TaoGroup(CommandGroup):
    """The top-level group: imports commands when they are used, and turns errors into lines and exit statuses."""

    def __init__(self, *given: Any, entries: Mapping[str, Entry] | None = None, **attributes: Any) -> None:
        """Take the arguments of `click.Group` (`Any`: as there), and the commands to import."""
        super().__init__(*given, **attributes)
        self.commands: _Commands = _Commands(entries or {})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, or its stub, which is enough for help."""
        return self.commands.data.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Import the command that is called."""
        self.commands.get(args[0])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command, and record how it ends in the audit log of commands, if there is one."""
        if not given("audit_log"):
            return super().invoke(ctx)
        from tao.cli.action_record import end_action

        try:
            status: object = super().invoke(ctx)
        except BaseException as error:
            end_action(ctx, error)
            raise
        end_action(ctx, status)
        return status

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run the command as click does, and end the process with this system's exit statuses. (`Any`: as in click.)"""
        try:
            Path.cwd()
        except FileNotFoundError:
            fail("the current folder does not exist any more: change to one that does", OPERATOR_STATUS)
        try:
            status = super().main(
                args, prog_name, complete_var, standalone_mode=False, windows_expand_args=windows_expand_args, **extra
            )
            sys.stdout.flush()
        except click.ClickException as error:
            _explained(error).show()
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt) as interruption:
            notes = getattr(interruption.__cause__, "__notes__", ())  # click raises its own of the interpreter's
            fail("; ".join(("interrupted", *notes)), INTERRUPTED_STATUS)
        except OperatorError as error:
            fail("; ".join((error.message, *getattr(error, "__notes__", ()))), OPERATOR_STATUS)
        except TaoError as error:
            text = "; ".join((f"{error.reason}: {error.message}", *getattr(error, "__notes__", ())))
            fail(text, OPERATOR_STATUS if isinstance(error, RequestError) else FAILED_STATUS)
        except ModuleNotFoundError as missing:
            text = missing_module_text(missing, sys.argv[1:] if args is None else args)
            if not text:
                raise
            fail(text, OPERATOR_STATUS)
        except BrokenPipeError:
            # The reader of the pipe has closed it; the interpreter must not fail when it flushes the rest.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)


def _explained(error: click.ClickException) -> click.ClickException:
    """Return an error of the command line; of a mistake at a group of commands with what to write instead."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None or context.parent is None:
        return error
    if not isinstance(context.command, click.Group):
        return _with_place_before(error, context) if isinstance(error, click.NoSuchOption) else error
    if isinstance(error, click.exceptions.NoSuchCommand) and not error.possibilities:
        commands = ", ".join(context.command.commands)
        return click.UsageError(f"{error.message} The commands here are {commands}.", context)
    if isinstance(error, click.NoSuchOption):
        place = f"`{context.command_path} COMMAND … {error.option_name}`"
        return click.UsageError(f"{error.message} Options stand after the command: {place}.", context)
    return error


def _with_place_before(error: click.NoSuchOption, context: click.Context) -> click.ClickException:
    """Return the error of a command that does not have an option, with where it belongs if the program has it."""
    root = context.find_root()
    before_only = {name for each in root.command.params for name in each.opts} - _OPTIONS_ANYWHERE
    if error.option_name not in before_only:
        return error
    command = context.command_path.removeprefix(f"{root.command_path} ")
    place = f"`{root.command_path} {error.option_name} … {command}`"
    return click.UsageError(f"{error.message} It stands before the command: {place}.", context)


def fail(message: str, status: int) -> NoReturn:
    """Print one line to standard error and exit with ``status``."""
    click.echo(f"tao: {message}", err=True)
    sys.exit(status)


def show(document: object, text: Callable[[], None]) -> None:
    """Print the result of a command: with ``--json`` the document, else what ``text`` prints."""
    if given("as_json"):
        print_json(document)
    else:
        text()


def ask(question: str) -> None:
    """Ask for confirmation on standard error; return when the answer is yes or ``--yes`` is given, else exit. With an
    audit log of commands, what was confirmed is recorded there first.

    click's own prompt is not used: it treats "no" and the end of the input like Ctrl-C."""
    if not given("yes"):
        _confirm(question)
    begin(question)


def begin(question: str = "") -> None:
    """Record in the audit log of commands, if there is one, that the running command changes something from here on.
    `ask` does it for what it has asked; a command that changes something without asking calls this.

    Raises `OperatorError` when that cannot be recorded: then nothing must be changed."""
    if given("audit_log"):
        from tao.cli.action_record import begin_action

        begin_action(question)


def _confirm(question: str) -> None:
    click.echo(f"{question} [y/N]: ", nl=False, err=True)
    sys.stderr.flush()
    answer = sys.stdin.readline()
    if not answer:
        click.echo(err=True)
        fail("there is no input to ask for confirmation: repeat with --yes", OPERATOR_STATUS)
    if answer.strip().lower() not in ("y", "yes"):
        fail("nothing was changed", DECLINED_STATUS)


def run(work: Coroutine[Any, Any, _Result], *, if_interrupted: str = "") -> _Result:
    """Run a command's asynchronous part on uvloop and return its result. ``if_interrupted``: what to do after Ctrl-C
    has left something half done, which is printed then."""
    import uvloop

    before = signal.getsignal(signal.SIGINT)
    try:
        with _without_link_warnings(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_interrupted_quietly(work))
    except KeyboardInterrupt as interruption:  # also of a second Ctrl-C, while the loop is closed
        if if_interrupted:
            interruption.add_note(if_interrupted)
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


async def _interrupted_quietly(work: Coroutine[Any, Any, _Result]) -> _Result:
    runners = signal.getsignal(signal.SIGINT)
    if callable(runners) and threading.current_thread() is threading.main_thread():
        interrupt_quietly(runners)
    return await work


def interrupt_quietly(handler: Callable[[int, FrameType | None], object]) -> None:
    """Handle Ctrl-C by ``handler``, and report no errors any more once it raises `KeyboardInterrupt`. That breaks off
    whatever the running loop does just then, a callback of a connection for example, which is no error of it."""
    loop = asyncio.get_running_loop()

    def raise_again() -> None:
        raise KeyboardInterrupt

    def on_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:  # Any: as in asyncio
        if isinstance(context.get("exception"), KeyboardInterrupt):  # a connection takes it for an error of its own
            loop.call_soon(raise_again)

    def on_signal(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except KeyboardInterrupt:
            loop.set_exception_handler(on_error)
            sys.unraisablehook = lambda _: None
            raise

    signal.signal(signal.SIGINT, on_signal)


@contextmanager
def _without_link_warnings() -> Iterator[None]:
    """Hide the warnings of links: the command itself reports a server that does not answer."""
    log = logging.getLogger("tao.wire.links")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
