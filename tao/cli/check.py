"""`tao verify` and `tao repair`: is what the caches hold right, and are edges and their inverses in step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tao.cli.frame import connect_option, json_option, run

if TYPE_CHECKING:
    from tao.cli.checking.caches import Report
    from tao.cli.checking.inverses import BrokenPair
    from tao.cli.checking.replicas import ReplicasReport
    from tao.cli.export_scan import ReaderLogin


def _database_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option("--schema", "schema_file", type=click.Path(path_type=Path), help="Schema file of the cluster."),
        click.option("--reader-user", default="tao_reader", show_default=True, help="Read-only database account."),
        click.option(
            "--reader-password", envvar="TAO_READER_PASSWORD", help="Its password; better in the environment."
        ),
        click.option("--token", envvar="TAO_TOKEN", default="", help="The cluster's shared secret, if it has one."),
        connect_option,
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.option("--sample", default=0, metavar="N", help="At most N entries of each shard at each server; 0: all.")
@click.option("--all-regions", is_flag=True, help="Compare the regions' databases with each other too, row by row.")
@_database_options
def verify(sample: int, all_regions: bool, token: str, as_json: bool, **login: Any) -> int:
    """Compare every cache of every region with the master databases.

    What is behind is looked at again after two seconds, so that messages on their way are not called faults. Exit
    status 1 when anything is wrong.
    """
    from tao.cli.export_scan import reader_login

    found = reader_login(**login)
    report = run(_verify(found, token, sample))
    replicas = run(_verify_replicas(found, token)) if all_regions else None
    _show_reports(report, replicas, as_json)
    return 0 if report.clean and (replicas is None or replicas.clean) else 1


async def _verify(login: ReaderLogin, token: str, sample: int) -> Report:
    from tao.cli.checking.access import access_of
    from tao.cli.checking.caches import verify_caches
    from tao.cli.waiting import Counting

    with Counting("entries compared") as counting:
        async with access_of(login, token) as access:
            return await verify_caches(
                access.routes, access.links, access.store, limit_per_shard=sample, on_progress=counting.show
            )


async def _verify_replicas(login: ReaderLogin, token: str) -> ReplicasReport:
    from tao.cli.checking.access import access_of
    from tao.cli.checking.replicas import compare_replicas
    from tao.cli.waiting import Counting

    with Counting("rows compared") as counting:
        async with access_of(login, token) as access:
            return await compare_replicas(
                access.routes, login.schema, access.scans, access.scans_in, on_progress=counting.show
            )


def _show_reports(report: Report, replicas: ReplicasReport | None, as_json: bool) -> None:
    import dataclasses

    from tao.cli.output import print_json

    if as_json:
        found = {**dataclasses.asdict(report), "clean": report.clean}
        if replicas is not None:
            found["replicas"] = {**dataclasses.asdict(replicas), "clean": replicas.clean}
        print_json(found)
        return
    _show_caches(report)
    if replicas is not None:
        _show_replicas(replicas)


def _show_replicas(report: ReplicasReport) -> None:
    from tao.cli.output import print_table

    print_table(
        ("replica", "region", "rows", "in flight", "wrong", "error"),
        [(line.server, line.region, line.rows, line.in_flight, line.wrong, line.error) for line in report.servers],
        right=("rows", "in flight", "wrong"),
    )
    for finding in report.findings[:20]:
        fault = "differs" if finding.at_master and finding.at_replica else "is missing"
        where = "" if fault == "differs" else " at the replica" if finding.at_master else " at the master"
        key = ", ".join(map(str, finding.key))
        click.echo(f"{finding.server}: {finding.table} ({key}) of shard {finding.shard} {fault}{where}")
    rows = sum(line.rows for line in report.servers)
    click.echo(f"{rows:,} rows compared: " + ("all replicas equal their masters" if report.clean else "NOT equal"))


def _show_caches(report: Report) -> None:
    from tao.cli.output import print_table

    print_table(
        ("server", "role", "entries", "in flight", "wrong", "error"),
        [(line.server, line.role, line.entries, line.in_flight, line.wrong, line.error) for line in report.servers],
        right=("entries", "in flight", "wrong"),
    )
    for finding in report.findings[:20]:
        click.echo(
            f"{finding.server}: {finding.kind} {finding.id}"
            + (f" type {finding.atype}" if finding.atype else "")
            + f" is {finding.verdict}: version {finding.cached_version} cached, {finding.stored_version} stored"
        )
    entries = sum(line.entries for line in report.servers)
    click.echo(f"{entries:,} entries compared: " + ("all caches equal the databases" if report.clean else "NOT equal"))


@click.command()
@click.option("--dry-run", is_flag=True, help="Only show what would be mended.")
@click.option("--yes", is_flag=True, help="Mend without asking.")
@_database_options
def repair(dry_run: bool, yes: bool, token: str, as_json: bool, **login: Any) -> int:
    """Find edges whose inverse is missing or differs, and mend them.

    Of a pair that disagrees the edge at the smaller id is the truth; the leader that coordinates the pair copies it to
    the other end. Leaders do this continuously for writes that a failure left half done; this finds all others.
    """
    from tao.cli.export_scan import reader_login
    from tao.cli.output import print_json, print_table

    found = reader_login(**login)
    pairs = run(_find(found, token))
    mended = 0
    if pairs and not as_json:
        print_table(
            ("smaller id", "larger id", "type", "fault"),
            [(pair.low_id, pair.high_id, found.schema.atype(pair.atype).name, pair.fault) for pair in pairs[:50]],
        )
        if len(pairs) > 50:
            click.echo(f"… and {len(pairs) - 50:,} more")
    if pairs and not dry_run and (yes or click.confirm(f"Mend {len(pairs):,} pairs?", err=True)):
        mended = run(_mend(found, token, pairs))
    if as_json:
        print_json(
            {
                "broken": [
                    {"low_id": pair.low_id, "high_id": pair.high_id, "atype": pair.atype, "fault": pair.fault}
                    for pair in pairs
                ],
                "mended": mended,
            }
        )
    else:
        click.echo(f"{len(pairs):,} pairs disagree; {mended:,} mended" if pairs else "every edge has its inverse")
    return 0 if mended == len(pairs) else 1


async def _find(login: ReaderLogin, token: str) -> list[BrokenPair]:
    from tao.cli.checking.access import access_of
    from tao.cli.checking.inverses import find_broken_pairs
    from tao.cli.waiting import Counting

    with Counting("edges looked at") as counting:
        async with access_of(login, token) as access:
            return await find_broken_pairs(
                access.routes,
                login.schema,
                access.scans,
                access.store,
                on_progress=lambda shard, edges: counting.show(f"shard {shard}", edges),
            )


async def _mend(login: ReaderLogin, token: str, pairs: list[BrokenPair]) -> int:
    from tao.cli.checking.access import access_of
    from tao.cli.checking.inverses import mend

    async with access_of(login, token) as access:
        return await mend(access.routes, access.links, pairs)
