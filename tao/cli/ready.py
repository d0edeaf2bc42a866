"""`tao ready`: one look at a server's admin port, for container health checks and start scripts."""

from __future__ import annotations

import click

from tao.cli.frame import run


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
    from tao.devcluster.readiness import admin_get

    status, body = run(admin_get(admin, "/ready"))
    click.echo(body.decode(errors="replace").strip())
    return 0 if status == 200 else 1
