"""The frame of every command: how errors end, what goes where, and how asynchronous work is run.

Output goes to standard output and is all a script sees; progress and errors go to standard error. A mistake of whoever
calls is one line and exit status 2, a request that failed its reason and message and exit status 3; 1 is left for an
answer: there is none, differences were found, it was not wanted; 4 is for what was done and leaves something to do.
Only a bug shows a traceback.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from tao.model.errors import OperatorError, RequestError, TaoError

DECLINED_STATUS = 1
OPERATOR_STATUS = 2
FAILED_STATUS = 3
INCOMPLETE_STATUS = 4
INTERRUPTED_STATUS = 130
REGION = "tao.region"
"""Where the running command's context keeps what ``--region`` was given."""
_Result = TypeVar("_Result")


class TaoGroup(click.Group):
    """The top-level group: turns errors into lines and exit statuses."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """As click's, with this system's errors. `Any` as click has it."""
        try:
            Path.cwd()
        except FileNotFoundError:
            fail("the folder that this was called in is gone; change to one that exists", OPERATOR_STATUS)
        try:
            status = super().main(
                args, prog_name, complete_var, standalone_mode=False, windows_expand_args=windows_expand_args, **extra
            )
            sys.stdout.flush()
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            fail("interrupted", INTERRUPTED_STATUS)
        except OperatorError as error:
            fail(error.message, OPERATOR_STATUS)
        except TaoError as error:
            text = "; ".join((f"{error.reason}: {error.message}", *getattr(error, "__notes__", ())))
            fail(text, OPERATOR_STATUS if isinstance(error, RequestError) else FAILED_STATUS)
        except BrokenPipeError:
            # Whoever read has seen enough; the interpreter must not fail at flushing the rest.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)


def fail(message: str, status: int) -> NoReturn:
    """One line on standard error, and out."""
    click.echo(f"tao: {message}", err=True)
    sys.exit(status)


def ask(question: str, yes: bool) -> None:
    """Return when the answer is yes, or ``yes`` was given beforehand; otherwise nothing is done, and out.

    Not click's: that tells neither a no nor the end of the input from Ctrl-C."""
    if yes:
        return
    click.echo(f"{question} [y/N]: ", nl=False, err=True)
    sys.stderr.flush()
    answer = sys.stdin.readline()
    if not answer:
        click.echo(err=True)
        fail("nobody to ask: repeat with --yes", OPERATOR_STATUS)
    if answer.strip().lower() not in ("y", "yes"):
        fail("nothing was changed", DECLINED_STATUS)


def run(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a command's asynchronous part on the fastest loop there is."""
    import uvloop

    with _links_unheard(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


@contextmanager
def _links_unheard() -> Iterator[None]:
    """No warnings of links: a server that is away is told of by the command's own error, table or second choice."""
    log = logging.getLogger("tao.peers.links")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


json_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, for scripts."
)
connect_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--connect",
    envvar="TAO_CONNECT",
    metavar="ADDRESS|FILE",
    help="A follower's host:port, or a topology file. Default: the development cluster in ./.tao-dev.",
)

document_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--connect",
    envvar="TAO_CONNECT",
    metavar="FILE",
    help="The topology file, which names the databases. Default: the development cluster in ./.tao-dev.",
)


def _keep_region(context: click.Context, _: click.Parameter, region: str | None) -> None:
    context.meta[REGION] = region


region_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--region",
    envvar="TAO_REGION",
    expose_value=False,
    callback=_keep_region,
    help="Whose followers are asked, of several regions. Default: the follower's that is named, else the first.",
)
