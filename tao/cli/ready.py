"""`tao ready`: one look at a server's admin port, for container health checks and start scripts."""

from __future__ import annotations

import click

from tao.cli.frame import fail, run
from tao.model.errors import Unavailable

NOT_READY_STATUS = 1


@click.command()
@click.option(
    "--admin",
    envvar="TAO_ADMIN",
    required=True,
    metavar="HOST:PORT",
    help="The server's admin address, as the topology has it. Default: TAO_ADMIN.",
)
def ready(admin: str) -> int:
    """Ask a server whether it should get traffic. Exit status 0 when it should, 1 when not yet or nobody answers."""
    from tao.runtime.admin_client import admin_get

    try:
        status, body = run(admin_get(admin, "/ready"))
    except Unavailable as error:
        fail(f"{error.reason}: {error.message}", NOT_READY_STATUS)
    click.echo(body.decode(errors="replace").strip())
    return 0 if status == 200 else NOT_READY_STATUS
