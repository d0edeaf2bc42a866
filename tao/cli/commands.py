"""The tree of commands: the one place that knows all of them."""

from __future__ import annotations

from pathlib import Path

import click

from tao import __version__
from tao.cli.databases import accounts, migrate, replicate
from tao.cli.demo import demo
from tao.cli.dev import dev
from tao.cli.drain import drain, undrain
from tao.cli.export import export
from tao.cli.frame import TaoGroup
from tao.cli.graph import add, count, delete, get, list_
from tao.cli.history import history, story
from tao.cli.invalidate import invalidate
from tao.cli.load import load
from tao.cli.mastership import promote, rejoin, reseed
from tao.cli.repair import repair
from tao.cli.schema import schema
from tao.cli.servers import follower, leader, ready, tailer, watcher
from tao.cli.shard import shard
from tao.cli.stats import arenas, stats
from tao.cli.status import status
from tao.cli.topology import topology
from tao.cli.verify import verify

_pem = click.Path(path_type=Path, exists=True, dir_okay=False)


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from tao.cache.packed import CORE

        click.echo(f"tao {__version__}, cache core: {CORE}")
        context.exit()


@click.group(cls=TaoGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and exit.",
)
@click.option(
    "--ca",
    type=_pem,
    envvar="TAO_CA",
    help="Connect with TLS, and trust server certificates that this authority signed (PEM).",
)
@click.option(
    "--certificate",
    type=_pem,
    envvar="TAO_CERTIFICATE",
    help="The certificate to show to servers that demand one (PEM).",
)
@click.option("--private-key", type=_pem, envvar="TAO_PRIVATE_KEY", help="The private key of --certificate (PEM).")
@click.pass_context
def tao(context: click.Context, ca: Path | None, certificate: Path | None, private_key: Path | None) -> None:
    """A geographically distributed, read-through graph cache over sharded MySQL.

    `tao dev up` starts a whole cluster on this machine; commands that name no other cluster use it.

    Exit status: 0 done; 1 a negative answer (nothing found, differences found, declined); 2 a wrong option or setup; 3
    the request failed; 4 done, with something left to do; 130 interrupted.
    """
    if ca or certificate or private_key:
        from tao.wire.tls import TlsFiles

        context.obj = TlsFiles(certificate, private_key, ca)


for command in (
    follower,
    leader,
    tailer,
    watcher,
    accounts,
    migrate,
    replicate,
    promote,
    rejoin,
    reseed,
    drain,
    undrain,
    ready,
    dev,
    demo,
    schema,
    topology,
    shard,
    get,
    list_,
    count,
    add,
    delete,
    stats,
    arenas,
    status,
    load,
    export,
    verify,
    repair,
    history,
    story,
    invalidate,
):
    tao.add_command(command)
