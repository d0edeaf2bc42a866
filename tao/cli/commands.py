"""The tree of commands: the one place that knows them all."""

from __future__ import annotations

from pathlib import Path

import click

from tao import __version__
from tao.cli.add import add, delete
from tao.cli.arenas import arenas
from tao.cli.check import verify
from tao.cli.databases import accounts, migrate
from tao.cli.demo import demo
from tao.cli.dev import dev
from tao.cli.drain import drain, undrain
from tao.cli.export import export
from tao.cli.frame import TaoGroup
from tao.cli.invalidate import invalidate
from tao.cli.load import load
from tao.cli.look import count, get, list_
from tao.cli.promote import promote, rejoin
from tao.cli.ready import ready
from tao.cli.repair import repair
from tao.cli.replicate import replicate
from tao.cli.reseed import reseed
from tao.cli.schema import schema
from tao.cli.servers import follower, leader, tailer, watcher
from tao.cli.shard import shard
from tao.cli.stats import stats
from tao.cli.status import status
from tao.cli.story import story
from tao.cli.topology import topology

_pem = click.Path(path_type=Path, exists=True, dir_okay=False)


def _tell_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from tao.cache.packed import CORE

        click.echo(f"tao {__version__}, cache core: {CORE}")
        context.exit()


@click.group(cls=TaoGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_tell_version, help="Say which.")
@click.option("--ca", type=_pem, envvar="TAO_CA", help="Connect by TLS to servers whose certificates it signed.")
@click.option("--certificate", type=_pem, envvar="TAO_CERTIFICATE", help="Shown to servers that demand one.")
@click.option("--private-key", type=_pem, envvar="TAO_PRIVATE_KEY", help="Of that certificate.")
@click.pass_context
def tao(context: click.Context, ca: Path | None, certificate: Path | None, private_key: Path | None) -> None:
    """A geographically distributed, read-through graph cache over sharded MySQL.

    `tao dev up` starts a whole cluster on this machine; the commands that look and load then find it by themselves.

    Exit status: 0 done; 1 the answer is no (there is none, differences were found, it was not wanted); 2 something must
    be said or set up differently; 3 the request failed; 130 interrupted.
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
    story,
    invalidate,
):
    tao.add_command(command)
