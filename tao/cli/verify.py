"""`tao verify`: compare caches with the databases, and replicas with their masters."""

from __future__ import annotations

import click

from tao.admin.access import ReaderLogin
from tao.admin.cache_verification import CachesReport, Finding, Sample, verify_caches
from tao.admin.documents import type_name
from tao.admin.replica_verification import ReplicasReport, compare_replicas
from tao.cli.frame import run, show
from tao.cli.logins import databases_of_command, reader_login
from tao.cli.options import json_option, reader_options
from tao.schema.registry import Schema
from tao.terminal import Counting, counted, fields_of, print_records_with_errors

_SHOWN_FINDINGS = 20


class SampleType(click.ParamType["Sample"]):
    """``N`` entries of each shard, or ``N%`` of them."""

    name = "N|N%"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Sample:
        """Parse a number of entries or a share."""
        from tao.admin.cache_verification import Sample

        text = str(value)
        try:
            percent = float(text[:-1]) if text.endswith("%") else 0.0
            entries = 0 if text.endswith("%") else int(text)
        except ValueError:
            self.fail(f"{text!r} is neither a number of entries nor a share: write 500 or 5%", param, ctx)
        if not (0 < percent <= 100 or (not text.endswith("%") and entries >= 0)):
            self.fail("a sample is a number of entries, or a share above 0% and up to 100%", param, ctx)
        return Sample(entries, percent / 100)


@click.command()
@click.option(
    "--sample",
    type=SampleType(),
    default="0",
    help="Compare about N entries of each shard at each server, or N% of them, evenly spread.  [default: all]",
)
@click.option("--all-regions", is_flag=True, help="Compare every replica and standby with its master too, row by row.")
@reader_options
@json_option
def verify(sample: Sample, all_regions: bool) -> int:
    """Compare every cache of every region with the master databases.

    An entry that differs is read again after two seconds: it was in flight when it has reached the version that the
    database had at first, and is wrong when it has not. Consistency is the share of entries that are not wrong.

    Exit status 1 when an entry is wrong, or when a server or a database could not be asked.
    """
    login = reader_login()
    report = run(_verify(login, sample))
    replicas = run(_verify_replicas(login)) if all_regions else None

    def text() -> None:
        _show_caches(report, login.schema)
        if replicas is not None:
            _show_replicas(replicas)

    show(_document(report, replicas, login.schema), text)
    return 0 if report.clean and (replicas is None or replicas.clean) else 1


async def _verify(login: ReaderLogin, sample: Sample) -> CachesReport:
    with Counting("entries compared") as counting:
        async with databases_of_command(login) as access:
            return await verify_caches(
                access.routes, access.links, access.store, sample=sample, on_progress=counting.show
            )


async def _verify_replicas(login: ReaderLogin) -> ReplicasReport:
    with Counting("rows compared") as counting:
        async with databases_of_command(login) as access:
            return await compare_replicas(
                access.routes, login.schema, access.scans, access.scans_at, on_progress=counting.show
            )


def _document(report: CachesReport, replicas: ReplicasReport | None, schema: Schema) -> dict[str, object]:
    def totals(found: CachesReport | ReplicasReport) -> dict[str, object]:
        return {"wrong": found.wrong, "unchecked_servers": found.unchecked, "clean": found.clean}

    return {
        "servers": report.servers,
        "findings": [{**fields_of(each), "atype": type_name(schema, each.atype) or None} for each in report.findings],
        **totals(report),
        "databases": report.databases,
        "unchecked_databases": report.unchecked_databases,
        "consistency": {**fields_of(report.consistency), "nines": report.consistency.nines},
        **({} if replicas is None else {"replicas": {**fields_of(replicas), **totals(replicas)}}),
    }


def _show_replicas(report: ReplicasReport) -> None:
    print_records_with_errors(report.servers, "server", "region", "rows", "in_flight", "wrong")
    for finding in report.findings[:_SHOWN_FINDINGS]:
        fault = "differs" if finding.at_master and finding.at_replica else "is missing"
        where = "" if fault == "differs" else " at the replica" if finding.at_master else " at the master"
        key = ", ".join(map(str, finding.key))
        click.echo(f"{finding.server}: {finding.table} ({key}) of shard {finding.shard} {fault}{where}")
    rows = sum(line.rows for line in report.servers)
    click.echo(f"{counted(rows, 'row')} compared, {_outcome(report, rows, 'all replicas equal their masters')}")


def _show_caches(report: CachesReport, schema: Schema) -> None:
    print_records_with_errors(report.servers, "server", "role", "entries", "in_flight", "wrong")
    for database in report.databases:
        if database.error:
            click.echo(f"database {database.database} ({database.server}) could not be read: {database.error}")
    for finding in report.findings[:_SHOWN_FINDINGS]:
        click.echo(_finding_text(finding, schema))
    compared = counted(report.consistency.looks, "entry", "entries")
    unread = f"; databases not compared: {', '.join(report.unchecked_databases)}" if report.unchecked_databases else ""
    clean = "all caches equal the databases" if report.consistency.looks else "the caches are empty"
    click.echo(f"{compared} compared, {_outcome(report, report.consistency.looks, clean)}{unread}")
    if report.consistency.looks:
        click.echo(f"consistency: {report.consistency.text('entries')}")


def _finding_text(finding: Finding, schema: Schema) -> str:
    atype = f" type {type_name(schema, finding.atype)}" if finding.atype else ""
    cached, stored = finding.cached_version, finding.stored_version
    if cached == stored:
        what = f"has the same version, other content: version {cached}"
    else:
        what = f"is {finding.verdict}: version {cached} cached, {stored} stored"
    return f"{finding.server}: {finding.kind} {finding.id}{atype} {what}"


def _outcome(report: CachesReport | ReplicasReport, compared: int, clean: str) -> str:
    if report.clean:
        return f"none wrong: {clean}"
    wrong = f"{report.wrong:,} wrong" if report.wrong else "none wrong" if compared else "so nothing is known"
    if not report.unchecked:
        return wrong
    names = ", ".join(line.server for line in report.servers if line.error)
    return f"{wrong}; {counted(report.unchecked, 'server')} could not be checked: {names}"
