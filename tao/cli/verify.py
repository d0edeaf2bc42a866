"""`tao verify`: compare caches with the databases, and replicas with their masters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tao.cli.connection import reader_login, tls_of_command
from tao.cli.frame import run
from tao.cli.options import database_options
from tao.terminal import Counting, counted, print_json, print_table

if TYPE_CHECKING:
    from tao.admin.access import ReaderLogin
    from tao.admin.cache_verification import CachesReport, Sample
    from tao.admin.replica_verification import ReplicasReport
    from tao.schema.registry import Schema

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
@click.option("--all-regions", is_flag=True, help="Compare every replica with its master too, row by row.")
@database_options
def verify(sample: Sample, all_regions: bool, token: str, as_json: bool, **login: Any) -> int:
    """Compare every cache of every region with the master databases.

    An entry that differs is read again after two seconds: it was in flight when it has reached the version that the
    database had at first, and is wrong when it has not. Consistency is the share of entries that are not wrong.

    Exit status 1 when an entry is wrong or a server could not be asked.
    """
    found = reader_login(**login)
    report = run(_verify(found, token, sample))
    replicas = run(_verify_replicas(found, token)) if all_regions else None
    _show_reports(report, replicas, found.schema, as_json)
    return 0 if report.clean and (replicas is None or replicas.clean) else 1


async def _verify(login: ReaderLogin, token: str, sample: Sample) -> CachesReport:
    from tao.admin.access import access_of
    from tao.admin.cache_verification import verify_caches

    with Counting("entries compared") as counting:
        async with access_of(login, token, tls_of_command()) as access:
            return await verify_caches(
                access.routes, access.links, access.store, sample=sample, on_progress=counting.show
            )


async def _verify_replicas(login: ReaderLogin, token: str) -> ReplicasReport:
    from tao.admin.access import access_of
    from tao.admin.replica_verification import compare_replicas

    with Counting("rows compared") as counting:
        async with access_of(login, token, tls_of_command()) as access:
            return await compare_replicas(
                access.routes, login.schema, access.scans, access.scans_in, on_progress=counting.show
            )


def _show_reports(report: CachesReport, replicas: ReplicasReport | None, schema: Schema, as_json: bool) -> None:
    import dataclasses

    from tao.admin.documents import type_name

    if as_json:
        findings = [
            {**dataclasses.asdict(each), "atype": type_name(schema, each.atype) or None} for each in report.findings
        ]
        consistency = {**dataclasses.asdict(report.consistency), "nines": report.consistency.nines}
        found = {**dataclasses.asdict(report), "findings": findings, **_totals(report), "consistency": consistency}
        if replicas is not None:
            found["replicas"] = {**dataclasses.asdict(replicas), **_totals(replicas)}
        print_json(found)
        return
    _show_caches(report, schema)
    if replicas is not None:
        _show_replicas(replicas)


def _totals(report: CachesReport | ReplicasReport) -> dict[str, object]:
    return {"wrong": report.wrong, "unchecked_servers": report.unchecked, "clean": report.clean}


def _show_replicas(report: ReplicasReport) -> None:
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


def _show_caches(report: CachesReport, schema: Schema) -> None:
    from tao.admin.documents import type_name

    print_table(
        ("server", "role", "entries", "in flight", "wrong", "error"),
        [(line.server, line.role, line.entries, line.in_flight, line.wrong, line.error) for line in report.servers],
        right=("entries", "in flight", "wrong"),
    )
    for finding in report.findings[:_SHOWN_FINDINGS]:
        click.echo(
            f"{finding.server}: {finding.kind} {finding.id}"
            + (f" type {type_name(schema, finding.atype)}" if finding.atype else "")
            + (
                f" has the same version, other content: version {finding.cached_version}"
                if finding.cached_version == finding.stored_version
                else f" is {finding.verdict}: version {finding.cached_version} cached, {finding.stored_version} stored"
            )
        )
    compared = counted(report.consistency.looks, "entry", "entries")
    click.echo(f"{compared} compared, {_outcome(report, 'all caches equal the databases')}")
    if report.consistency.looks:
        click.echo(f"consistency: {report.consistency.text('entries')}")


def _outcome(report: CachesReport | ReplicasReport, clean: str) -> str:
    if report.clean:
        return f"none wrong: {clean}"
    wrong = f"{report.wrong:,} wrong" if report.wrong else "none wrong"
    return wrong + (f"; {counted(report.unchecked, 'server')} could not be checked" if report.unchecked else "")
