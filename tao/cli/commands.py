"""The tree of commands: the one place that knows all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from tao import __version__
from tao.cli.frame import Entry, TaoGroup
from tao.cli.options import InputFile, audit_log_option, global_options, token_file_option

COMMANDS: Final = {
    "access": Entry("access", "Check an access document, and explain what a caller may do."),
    "accounts": Entry("databases", "Create the accounts on every database server, or set their passwords."),
    "add": Entry("graph", "Add an object or an edge."),
    "arenas": Entry(
        "stats", "Show the arenas of every server: their budgets, their content, and how long entries stay."
    ),
    "audit": Entry("audit", "Check audit logs."),
    "backup": Entry("backup", "Make, check and restore backups of all databases."),
    "count": Entry("graph", "Show how many edges an association list has."),
    "counter": Entry("graph", "Show the value of a counter of an object."),
    "database": Entry("database", "Move shards to other databases while they are read and written."),
    "delete": Entry("graph", "Delete an object or an edge."),
    "demo": Entry(
        "demo",
        "Show a whole cluster at work: a page for two viewers, a social graph cold and warm, writes, a check, two "
        "regions.",
    ),
    "dev": Entry("dev", "Run a development cluster on this machine."),
    "doctor": Entry("doctor", "Look for the usual mistakes of an installation, and say what to do about each."),
    "drain": Entry("drain", "Take SERVER out of use, and say when it is safe to stop it."),
    "export": Entry("export", "Write objects, edges or states of nodes as CSV, in the formats that `tao load` reads."),
    "follower": Entry("servers", "Run a follower: the cache server that clients talk to."),
    "get": Entry("graph", "Show an object."),
    "history": Entry(
        "history", "Show what happened to an object (ID) or an association list (ID ATYPE) at every server."
    ),
    "invalidate": Entry("invalidate", "Have caches drop what they hold and read it again from the databases."),
    "jobs": Entry("jobs", "List, pause, cancel and add background jobs, which workers do."),
    "journal": Entry(
        "journal", "Show what followers have accepted and not made yet, and decide about what was given up."
    ),
    "leader": Entry("servers", "Run a leader: the cache server that talks to the databases and orders the writes."),
    "list": Entry("graph", "Show the edges of an association list, newest first."),
    "load": Entry("load", "Load objects, edges and states of nodes from CSV files."),
    "migrate": Entry("databases", "Create the tables of every shard, or bring them up to date."),
    "node": Entry("graph", "Set the state of a node, which hides or restores its edges of types with states."),
    "promote": Entry("mastership", "Make another region's server the master of DATABASE."),
    "ready": Entry("servers", "Ask a server whether it is ready for traffic."),
    "rejoin": Entry("mastership", "Have SERVER, a former master that is back, follow the master of its database."),
    "repair": Entry(
        "repair", "Find edges whose inverse is missing or differs, and lists whose count is wrong, and repair them."
    ),
    "replicate": Entry("databases", "Have every replica follow its master, as the topology names it."),
    "reseed": Entry("mastership", "Rebuild SERVER, a replica of its database, from the master."),
    "schema": Entry("schema", "Check and show schemas."),
    "sets": Entry("sets", "Evaluate a set expression over association lists, and say how it was done."),
    "shard": Entry("shard", "Show which shards are read most, and change how many servers of a tier serve a shard."),
    "stats": Entry(
        "stats", "Show hit rates, cache entries and bytes of every server and of its arenas, since it started."
    ),
    "status": Entry("status", "Show what is wrong with the cluster, then all regions, servers and databases."),
    "tailer": Entry("servers", "Run a tailer: it reads a database's binlog and reports changes to the leaders."),
    "token": Entry("token", "Make, list and revoke the tokens that servers accept."),
    "topology": Entry("topology", "Show and change the topology document."),
    "undrain": Entry("drain", "Put SERVER, which runs again, back into use."),
    "verify": Entry("verify", "Compare every cache of every region with the master databases."),
    "watcher": Entry(
        "servers", "Run a watcher: it marks lost servers down, renews the masters' leases, and replaces a lost master."
    ),
    "worker": Entry("servers", "Run a worker: it does background jobs, which leaders hand out."),
    "story": Entry("history", ""),
}
"""Each command by its name: the module that defines it, and the first sentence of its help; none for a hidden one."""
_pem = InputFile()


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from tao.cache.packed import CORE

        click.echo(f"tao {__version__}, cache core: {CORE}")
        context.exit()


@click.group(
    cls=TaoGroup,
    entries=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
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
    show_envvar=True,
    help="Connect with TLS, and trust server certificates that this authority signed (PEM).",
)
@click.option(
    "--certificate",
    type=_pem,
    envvar="TAO_CERTIFICATE",
    show_envvar=True,
    help="The certificate to show to servers that demand one (PEM).",
)
@click.option(
    "--private-key",
    type=_pem,
    envvar="TAO_PRIVATE_KEY",
    show_envvar=True,
    help="The private key of --certificate (PEM).",
)
@click.option(
    "--cluster",
    default="",
    envvar="TAO_CLUSTER",
    show_envvar=True,
    metavar="SPIFFE-ID",
    help="Talk to a server over frames only when its certificate names it as a server of spiffe://DOMAIN/tao/CLUSTER.",
)
@token_file_option
@audit_log_option
@global_options
@click.pass_context
def tao(
    context: click.Context, ca: Path | None, certificate: Path | None, private_key: Path | None, cluster: str
) -> None:
    """A geographically distributed, read-through graph cache over sharded MySQL.

    `tao dev up` starts a whole cluster on this machine; commands that name no other cluster use it. --connect,
    --state-dir and --json are accepted before a command and after it.

    Exit status: 0 done; 1 a negative answer (nothing found, differences found, declined); 2 a wrong option or setup; 3
    the request failed; 4 done, with something left to do; 130 interrupted.
    """
    if ca or certificate or private_key or cluster:
        from tao.wire.tls import TlsFiles

        context.obj = TlsFiles(certificate, private_key, ca, cluster=cluster)
