"""`tao verify`: is what the caches hold right, and do replicas equal their masters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tao.cli.checking.options import database_options, name_of
from tao.cli.frame import run

if TYPE_CHECKING:
    from tao.cli.checking.caches import Report, Sample
    from tao.cli.checking.replicas import ReplicasReport
    from tao.cli.export_scan import ReaderLogin
    from tao.schema.registry import Schema

_SHOWN_FINDINGS = 20


class SampleType(click.ParamType["Sample"]):
    """``N`` entries of each shard, or ``N%`` of them."""

    name = "N|N%"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Sample:
        """See click."""
        from tao.cli.checking.caches import Sample

        text = str(value)
        try:
            percent = float(text[:-1]) if text.endswith("%") else 0.0
            entries = 0 if text.endswith("%") else int(text)
        except ValueError:
            self.fail(f"{text!r} is neither a number of entries nor a share like 5%", param, ctx)
        if not (0 < percent <= 100 or (not text.endswith("%") and entries >= 0)):
            self.fail("a sample is a number of entries, or a share above 0% and up to 100%", param, ctx)
        return Sample(entries, percent / 100)


@click.command()
@click.option(
    "--sample",
    type=SampleType(),
    default="0",
    help="About so many entries of each shard at each server, spread over all, or that share.  [default: all]",
)
@click.option("--all-regions", is_flag=True, help="Compare the regions' databases with each other too, row by row.")
@database_options
def verify(sample: Sample, all_regions: bool, token: str, as_json: bool, **login: Any) -> int:
    """Compare every cache of every region with the master databases.

    What differs is looked at again after two seconds: by its version it is in flight when it has reached what the
    database had at the first look, and wrong when it has not. Consistency is the share that is not wrong.

    Exit status 1 when anything is wrong, or a server could not be asked.
    """
    from tao.cli.export_scan import reader_login

    found = reader_login(**login)
    report = run(_verify(found, token, sample))
    replicas = run(_verify_replicas(found, token)) if all_regions else None
    _show_reports(report, replicas, found.schema, as_json)
    return 0 if report.clean and (replicas is None or replicas.clean) else 1


async def _verify(login: ReaderLogin, token: str, sample: Sample) -> Report:
    from tao.cli.checking.access import access_of
    from tao.cli.checking.caches import verify_caches
    from tao.cli.waiting import Counting

    with Counting("entries compared") as counting:
        async with access_of(login, token) as access:
            return await verify_caches(
                access.routes, access.links, access.store, sample=sample, on_progress=counting.show
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
            {**dataclasses.asdict(each), "atype": name_of(schema, each.atype) or None} for each in report.findings
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
            + (f" type {name_of(schema, finding.atype)}" if finding.atype else "")
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


def _outcome(report: Report | ReplicasReport, clean: str) -> str:
    from tao.cli.output import counted

    if report.clean:
        return f"none wrong: {clean}"
    wrong = f"{report.wrong:,} wrong" if report.wrong else "none wrong"
    return wrong + (f"; {counted(report.unchecked, 'server')} could not be checked" if report.unchecked else "")
