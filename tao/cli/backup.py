"""`tao backup`: make backups of all databases, keep their binlogs, check them, and restore them into a new cluster."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

import click

from tao.admin.access import ReaderLogin
from tao.admin.backup import BackupReport, archive_binlogs, create_backup, restorable, verify_backup
from tao.admin.backup_files import BinlogIndex, Manifest, read_index, read_manifest
from tao.admin.documents import export_documents, load_topology, read_access, read_schema, topology_file
from tao.admin.restore import (
    DatabaseRestore,
    RestoreRepair,
    RestoreResult,
    observe_targets,
    plan_restore,
    repair_restored,
    restore_backup,
    utc_text,
)
from tao.cli.connection import secret_of_command, tls_of_command, topology_path
from tao.cli.frame import INCOMPLETE_STATUS, CommandGroup, ask, run, show
from tao.cli.logins import administrator_login, schema_place
from tao.cli.options import InputFile, changing_options, given, json_option, topology_options
from tao.etcd.location import EtcdLocation, Location
from tao.terminal import LINE_SECONDS, WaitDisplay, counted, fields_of, print_records
from tao.topology.document import dump_topology

_ACCESS_FILE: Final = "access.yaml"
_file = InputFile()
_folder = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
_region_option = click.option(
    "--region", help="Use the database servers of this region.  [default: a replica of each database, else the master]"
)


@click.group(cls=CommandGroup)
def backup() -> None:
    """Make, check and restore backups of all databases."""


@backup.command()
@_folder
@click.option(
    "--schema",
    "schema_file",
    type=_file,
    help="The schema file of the cluster.  [default: the one beside the topology in etcd, or that of the development "
    "cluster in --state-dir]",
)
@click.option(
    "--access",
    "access_file",
    type=_file,
    help="The access document.  [default: access.yaml beside the topology, if there is one]",
)
@_region_option
@topology_options
def create(folder: Path, schema_file: Path | None, access_file: Path | None, region: str | None) -> None:
    """Dump all databases into the new folder DIR, while writes go on.

    Each database is dumped from one snapshot and without locks: from a replica where there is one, after that has
    received all that the master had when the command began. Topology, schema and access document are kept with the
    dumps. The manifest, with the positions and the hashes of all files, is written last. Password: TAO_ADMIN_PASSWORD.
    The tools of the database are needed here (mariadb-dump or mysqldump).
    """
    path, administrator = topology_path(), administrator_login()
    topology = load_topology(path)
    documents = {
        "topology.json": dump_topology(topology).encode(),
        "schema.yaml": read_schema(schema_place(path, schema_file))[1].encode(),  # a backup of a wrong one is refused
        **_access_text(path, access_file),
    }
    with _Progress() as progress:
        done = run(create_backup(folder, topology, documents, administrator, region=region, on_progress=progress.show))

    def text() -> None:
        print_records(
            {
                "database": dump.name,
                "server": dump.server,
                "position": dump.position,
                "size_bytes": dump.file.size_bytes,
            }
            for dump in done.databases
        )
        click.echo(f"{folder} has every write that was acknowledged before {utc_text(done.begun_unix_ms)}")

    show(done, text)


def _access_text(topology: Location, file: Path | None) -> dict[str, bytes]:
    """Return the access document by its name, if there is one."""
    if file is None and isinstance(topology, EtcdLocation):
        text = run(export_documents(topology)).access
        return {} if text is None else {_ACCESS_FILE: text.encode()}
    found = file or (topology.with_name(_ACCESS_FILE) if isinstance(topology, Path) else None)
    if found is None or (file is None and not found.exists()):
        return {}
    read_access(found)
    return {_ACCESS_FILE: found.read_bytes()}


@backup.command()
@_folder
@_region_option
@topology_options
def binlogs(folder: Path, region: str | None) -> None:
    """Copy the binlogs since the backup in DIR to it, so that any moment until now can be restored.

    Repeat it every few minutes: what was written since the last time is lost together with the databases. Each time the
    server begins a new binlog file, and the closed ones are copied, each once. Password: TAO_ADMIN_PASSWORD. The tools
    of the database are needed here (mariadb-binlog or mysqlbinlog).
    """
    path, administrator = topology_path(), administrator_login()
    with _Progress() as progress:
        load = topology_file(path).load
        done = run(archive_binlogs(folder, load, administrator, region=region, on_progress=progress.show))
    show(done, lambda: _print_binlogs(read_manifest(folder), done))


def _print_binlogs(manifest: Manifest, index: BinlogIndex) -> None:
    print_records(
        {
            "database": each.database,
            "server": each.server,
            "files": len(each.files),
            "size_bytes": sum(file.size_bytes for file in each.files),
        }
        for each in index.copies
    )
    first, last = restorable(manifest, index)
    click.echo(f"can be restored to any moment from {utc_text(first)} to {utc_text(last)}")


@backup.command()
@_folder
@json_option
def verify(folder: Path) -> int:
    """Read every file in DIR, and compare it with the hash that it was written with.

    Exit status 1 when a file is missing or was changed.
    """
    with _Progress() as progress:
        report = run(verify_backup(folder, progress.show))
    show(report, lambda: _print_report(report))
    return 1 if report.faults else 0


def _print_report(report: BackupReport) -> None:
    print_records(report.faults)
    files = counted(report.files, "file")
    if report.faults:
        click.echo(f"{len(report.faults):,} of {files} damaged")
    else:
        first, last = utc_text(report.from_unix_ms), utc_text(report.until_unix_ms)
        click.echo(f"{files} as they were written; the backup reaches from {first} to {last}")


class Moment(click.ParamType[int]):
    """A time in UTC, to the second."""

    name = "TIME"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the seconds since 1970."""
        if isinstance(value, int):
            return value
        try:
            found = datetime.fromisoformat(str(value))
        except ValueError:
            self.fail(f"{value!r} is no time: write 2026-11-25T14:05:00Z", param, ctx)
        if found.microsecond:
            self.fail(f"{value!r} has a part of a second: binlogs have seconds only", param, ctx)
        return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp())


@backup.command()
@_folder
@click.option(
    "--until",
    type=Moment(),
    help="Restore the writes that began before this time, such as 2026-11-25T14:05:00Z.  [default: all that DIR has]",
)
@click.option(
    "--former-topology",
    type=_file,
    help="The last topology document of the lost cluster. Version epochs then rise by nine, and not by a thousand.",
)
@changing_options
def restore(folder: Path, until: int | None, former_topology: Path | None) -> int:
    """Restore the backup in DIR into the empty databases of a new cluster.

    The topology is the new cluster's: the same databases and shards, on servers that have accounts and no shards. The
    files are checked, then the masters are filled, while no service can use them; replicas follow (`tao replicate`).
    Stop what is left of the lost cluster before: ids that it gives out during the restore could be given out again.
    Version epochs and the times of reserved ids rise above any that the lost cluster can have used, and the leaders, if
    they run, repair pairs of edges that the backup has half. An interrupted restore is repeated by the same command.
    Password: TAO_ADMIN_PASSWORD.

    Exit status 4: it is restored, and pairs are not repaired: start the servers, then `tao repair`.
    """
    path, administrator = topology_path(), administrator_login()
    topology = load_topology(path)
    plan = plan_restore(
        read_manifest(folder),
        read_index(folder),
        topology,
        run(observe_targets(topology, administrator)),
        until_unix_seconds=until,
        former=load_topology(former_topology) if former_topology is not None else None,
    )
    if not given("as_json"):
        print_records(map(_plan_row, plan))
    ask(f"Restore {folder} to {', '.join(each.master.name for each in plan)}?")
    with _Progress() as progress:
        done = run(
            restore_backup(folder, path, plan, administrator, progress.show),
            if_interrupted="repeat the command, which begins anew",
        )
        progress.show("all databases", "waiting for the leaders, to repair what the backup has half")
        schema, _ = read_schema(folder / "schema.yaml")
        login = ReaderLogin(load_topology(path), schema, administrator.user, administrator.password)
        repair = run(repair_restored(login, secret_of_command(), tls_of_command()))
    document = {**fields_of(done), "repair": repair}
    show(document, lambda: _print_restored(done, repair))
    return 0 if repair.complete else INCOMPLETE_STATUS


def _plan_row(each: DatabaseRestore) -> dict[str, object]:
    return {
        "database": each.database.name,
        "to": each.master.name,
        "dump of": each.dump.server,
        "size_bytes": each.dump.file.size_bytes,
        "binlogs": len(each.binlogs),
        "until": "the end" if each.until_unix_seconds is None else utc_text(each.until_unix_seconds * 1_000),
        "replaces": "an interrupted restore" if each.replaces else "nothing",
    }


def _print_restored(done: RestoreResult, repair: RestoreRepair) -> None:
    print_records(done.databases)
    if not repair.error:
        half = f"{counted(repair.pairs, 'pair')} half, {counted(repair.counts, 'count')} wrong"
        click.echo(f"{half}; {repair.repaired:,} repaired")
    if not repair.complete:
        click.echo(f"not repaired: {repair.error or 'see above'}", err=True)
        click.echo(
            "left to do: `tao migrate`, `tao replicate`, start the servers, `tao repair`, `tao verify`", err=True
        )


class _Progress:
    """Shows how far each database is, a line every few seconds. A context manager."""

    def __init__(self) -> None:
        self._display = WaitDisplay()
        self._next_line_at: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._display.__exit__()

    def show(self, where: str, done: str) -> None:
        """Show what was done of a database or a file."""
        now = time.monotonic()
        if now >= self._next_line_at.get(where, 0.0):
            self._next_line_at[where] = now + LINE_SECONDS
            self._display.show(f"{where}: {done}")
