"""`tao verify` and `tao repair`: is what the caches hold right, and are edges and their inverses in step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tao.cli.frame import ask, document_option, json_option, run

if TYPE_CHECKING:
    from tao.cli.checking.caches import Report
    from tao.cli.checking.inverses import BrokenPair
    from tao.cli.checking.replicas import ReplicasReport
    from tao.cli.export_scan import ReaderLogin
    from tao.schema.registry import Schema

_SHOWN_FINDINGS = 20
_SHOWN_PAIRS = 50


def _database_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option("--schema", "schema_file", type=click.Path(path_type=Path), help="Schema file of the cluster."),
        click.option("--reader-user", default="tao_reader", show_default=True, help="Read-only database account."),
        click.option(
            "--reader-password", envvar="TAO_READER_PASSWORD", help="Its password; better in the environment."
        ),
        click.option("--token", envvar="TAO_TOKEN", default="", help="The cluster's shared secret, if it has one."),
        document_option,
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.option(
    "--sample",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="At most N entries of each shard at each server; 0: all.",
)
@click.option("--all-regions", is_flag=True, help="Compare the regions' databases with each other too, row by row.")
@_database_options
def verify(sample: int, all_regions: bool, token: str, as_json: bool, **login: Any) -> int:
    """Compare every cache of every region with the master databases.

    What is behind is looked at again after two seconds, so that messages on their way are not called faults. Exit
    status 1 when anything is wrong, or a server could not be asked.
    """
    from tao.cli.export_scan import reader_login

    found = reader_login(**login)
    report = run(_verify(found, token, sample))
    replicas = run(_verify_replicas(found, token)) if all_regions else None
    _show_reports(report, replicas, found.schema, as_json)
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


def _show_reports(report: Report, replicas: ReplicasReport | None, schema: Schema, as_json: bool) -> None:
    import dataclasses

    from tao.cli.output import print_json

    if as_json:
        findings = [
            {**dataclasses.asdict(each), "atype": _name_of(schema, each.atype) or None} for each in report.findings
        ]
        found = {**dataclasses.asdict(report), "findings": findings, **_totals(report)}
        if replicas is not None:
            found["replicas"] = {**dataclasses.asdict(replicas), **_totals(replicas)}
        print_json(found)
        return
    _show_caches(report, schema)
    if replicas is not None:
        _show_replicas(replicas)


def _totals(report: Report | ReplicasReport) -> dict[str, object]:
    return {"wrong": report.wrong, "unchecked_servers": report.unchecked, "clean": report.clean}


def _show_replicas(report: ReplicasReport) -> None:
    from tao.cli.output import counted, print_table

    print_table(
        ("replica", "region", "rows", "in flight", "wrong", "error"),
        [(line.server, line.region, line.rows, line.in_flight, line.wrong, line.error) for line in report.servers],
        right=("rows", "in flight", "wrong"),
    )
    for finding in report.findings[:_SHOWN_FINDINGS]:
        fault = "differs" if finding.at_master and finding.at_replica else "is missing"
        where = "" if fault == "differs" else " at the replica" if finding.at_master else " at the master"
        key = ", ".join(map(str, finding.key))
        click.echo(f"{finding.server}: {finding.table} ({key}) of shard {finding.shard} {fault}{where}")
    rows = sum(line.rows for line in report.servers)
    click.echo(f"{counted(rows, 'row')} compared, {_outcome(report, 'all replicas equal their masters')}")


def _show_caches(report: Report, schema: Schema) -> None:
    from tao.cli.output import counted, print_table

    print_table(
        ("server", "role", "entries", "in flight", "wrong", "error"),
        [(line.server, line.role, line.entries, line.in_flight, line.wrong, line.error) for line in report.servers],
        right=("entries", "in flight", "wrong"),
    )
    for finding in report.findings[:_SHOWN_FINDINGS]:
        click.echo(
            f"{finding.server}: {finding.kind} {finding.id}"
            + (f" type {_name_of(schema, finding.atype)}" if finding.atype else "")
            + (
                f" has the same version, other content: version {finding.cached_version}"
                if finding.cached_version == finding.stored_version
                else f" is {finding.verdict}: version {finding.cached_version} cached, {finding.stored_version} stored"
            )
        )
    entries = sum(line.entries for line in report.servers)
    compared = counted(entries, "entry", "entries")
    click.echo(f"{compared} compared, {_outcome(report, 'all caches equal the databases')}")


def _outcome(report: Report | ReplicasReport, clean: str) -> str:
    from tao.cli.output import counted

    if report.clean:
        return f"none wrong: {clean}"
    wrong = f"{report.wrong:,} wrong" if report.wrong else "none wrong"
    return wrong + (f"; {counted(report.unchecked, 'server')} could not be checked" if report.unchecked else "")


def _name_of(schema: Schema, atype: int) -> str:
    """Its number, when the given schema is older than the type; empty for 0, which is none."""
    found = next((each.name for each in schema.assocs if each.number == atype), "")
    return found or (str(atype) if atype else "")


@click.command()
@click.option("--dry-run", is_flag=True, help="Only show what would be mended.")
@click.option("--yes", is_flag=True, help="Mend without asking.")
@_database_options
def repair(dry_run: bool, yes: bool, token: str, as_json: bool, **login: Any) -> int:
    """Find edges whose inverse is missing or differs, and mend them.

    Of a pair that disagrees the edge at the smaller id is the truth: the leader that coordinates the pair copies it to
    the larger id, and an edge that the smaller id does not have is DELETED at the larger id. The column "mending" says
    which. Leaders do this continuously for writes that a failure left half done; this finds all others.

    Exit status 1 when pairs that disagree were left.
    """
    from tao.cli.export_scan import reader_login
    from tao.cli.output import counted, print_json

    found = reader_login(**login)
    pairs = run(_find(found, token))
    if pairs and not as_json:
        _show_pairs(pairs, found.schema)
    mended = 0
    if pairs and not dry_run:
        deletions = sum(pair.deletes for pair in pairs)
        deleting = counted(deletions, "edge") if deletions else "nothing"
        ask(f"Mend {counted(len(pairs), 'pair')}, deleting {deleting}?", yes)
        mended = run(_mend(found, token, pairs))
    if as_json:
        broken = [
            {
                "low_id": pair.low_id,
                "high_id": pair.high_id,
                "atype": _name_of(found.schema, pair.atype),
                "fault": pair.fault,
                "mending": pair.mending,
            }
            for pair in pairs
        ]
        print_json({"broken": broken, "mended": mended})
    else:
        disagree = f"{counted(len(pairs), 'pair')} {'disagrees' if len(pairs) == 1 else 'disagree'}"
        click.echo(f"{disagree}; {mended:,} mended" if pairs else "every edge has its inverse")
    return 0 if mended == len(pairs) else 1


def _show_pairs(pairs: list[BrokenPair], schema: Schema) -> None:
    from tao.cli.output import print_table

    print_table(
        ("smaller id", "larger id", "type", "fault", "mending"),
        [
            (pair.low_id, pair.high_id, _name_of(schema, pair.atype), pair.fault, pair.mending)
            for pair in pairs[:_SHOWN_PAIRS]
        ],
    )
    if len(pairs) > _SHOWN_PAIRS:
        click.echo(f"… and {len(pairs) - _SHOWN_PAIRS:,} more")


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
    from tao.cli.connecting import pointing_to_stats

    with pointing_to_stats():
        async with access_of(login, token) as access:
            return await mend(access.routes, access.links, pairs)
