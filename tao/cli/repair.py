"""`tao repair`: edges without their inverse, and counts that are not those of their lists, found and mended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tao.cli.checking.options import database_options, name_of
from tao.cli.frame import ask, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tao.cli.checking.counts import WrongCount
    from tao.cli.checking.inverses import BrokenPair
    from tao.cli.export_scan import ReaderLogin
    from tao.schema.registry import Schema

_SHOWN = 50


@click.command()
@click.option("--dry-run", is_flag=True, help="Only show what would be mended.")
@click.option("--yes", is_flag=True, help="Mend without asking.")
@click.option("--only", type=click.Choice(["inverses", "counts"]), help="Look for these alone.  [default: both]")
@database_options
def repair(dry_run: bool, yes: bool, only: str | None, token: str, as_json: bool, **login: Any) -> int:
    """Find edges whose inverse is missing or differs and lists whose count is wrong, and mend them.

    Of a pair that disagrees the edge at the smaller id is the truth: the leader that coordinates the pair copies it to
    the larger id, and an edge that the smaller id does not have is DELETED at the larger id. The column "mending" says
    which. A list is counted anew by the leader that owns it. Leaders settle what a failure of their own left half done
    continuously; this finds all others.

    Exit status 1 when something was left as it is.
    """
    from tao.cli.export_scan import reader_login
    from tao.cli.output import counted, print_json

    found = reader_login(**login)
    pairs = run(_find(found, token)) if only != "counts" else []
    counts = run(_find_counts(found, token)) if only != "inverses" else []
    if not as_json:
        _show_pairs(pairs, found.schema)
        _show_counts(counts, found.schema)
    mended = recounted = 0
    if (pairs or counts) and not dry_run:
        deletions = sum(pair.deletes for pair in pairs)
        deleting = counted(deletions, "edge") if deletions else "nothing"
        also = f" and {counted(len(counts), 'count')}" if counts else ""
        ask(f"Mend {counted(len(pairs), 'pair')}{also}, deleting {deleting}?", yes)
        mended = run(_mend(found, token, pairs)) if pairs else 0
        recounted = run(_mend_counts(found, token, counts)) if counts else 0
    if as_json:
        print_json(
            {
                "broken": [_pair_as_json(pair, found.schema) for pair in pairs],
                "mended": mended,
                "wrong_counts": [_count_as_json(each, found.schema) for each in counts],
                "recounted": recounted,
            }
        )
    else:
        _summarize(pairs, mended, counts, recounted, only)
    return 0 if mended == len(pairs) and recounted == len(counts) else 1


def _summarize(
    pairs: Sequence[BrokenPair], mended: int, counts: Sequence[WrongCount], recounted: int, only: str | None
) -> None:
    from tao.cli.output import counted

    if only != "counts":
        disagree = f"{counted(len(pairs), 'pair')} {'disagrees' if len(pairs) == 1 else 'disagree'}"
        click.echo(f"{disagree}; {mended:,} mended" if pairs else "every edge has its inverse")
    if only != "inverses":
        wrong = f"{counted(len(counts), 'count')} {'is' if len(counts) == 1 else 'are'} wrong"
        click.echo(f"{wrong}; {recounted:,} mended" if counts else "every list has its count")


def _pair_as_json(pair: BrokenPair, schema: Schema) -> dict[str, object]:
    return {
        "low_id": pair.low_id,
        "high_id": pair.high_id,
        "atype": name_of(schema, pair.atype),
        "fault": pair.fault,
        "mending": pair.mending,
    }


def _count_as_json(each: WrongCount, schema: Schema) -> dict[str, object]:
    return {"id1": each.id1, "atype": name_of(schema, each.atype), "stored": each.stored, "counted": each.counted}


def _show_pairs(pairs: Sequence[BrokenPair], schema: Schema) -> None:
    from tao.cli.output import print_table

    if pairs:
        print_table(
            ("smaller id", "larger id", "type", "fault", "mending"),
            [
                (pair.low_id, pair.high_id, name_of(schema, pair.atype), pair.fault, pair.mending)
                for pair in pairs[:_SHOWN]
            ],
        )
        _show_rest(len(pairs))


def _show_counts(counts: Sequence[WrongCount], schema: Schema) -> None:
    from tao.cli.output import print_table

    if counts:
        print_table(
            ("id", "type", "count stored", "edges"),
            [(each.id1, name_of(schema, each.atype), each.stored, each.counted) for each in counts[:_SHOWN]],
            right=("count stored", "edges"),
        )
        _show_rest(len(counts))


def _show_rest(number: int) -> None:
    if number > _SHOWN:
        click.echo(f"… and {number - _SHOWN:,} more")


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


async def _find_counts(login: ReaderLogin, token: str) -> list[WrongCount]:
    from tao.cli.checking.access import access_of
    from tao.cli.checking.counts import find_wrong_counts
    from tao.cli.waiting import Counting

    with Counting("lists counted") as counting:
        async with access_of(login, token) as access:
            return await find_wrong_counts(
                access.routes,
                login.schema,
                access.patient_scans,
                on_progress=lambda shard, lists: counting.show(f"shard {shard}", lists),
            )


async def _mend(login: ReaderLogin, token: str, pairs: Sequence[BrokenPair]) -> int:
    from tao.cli.checking.access import access_of
    from tao.cli.checking.inverses import mend
    from tao.cli.connecting import pointing_to_stats

    with pointing_to_stats():
        async with access_of(login, token) as access:
            return await mend(access.routes, access.links, pairs)


async def _mend_counts(login: ReaderLogin, token: str, counts: Sequence[WrongCount]) -> int:
    from tao.cli.checking.access import access_of
    from tao.cli.checking.counts import mend_counts
    from tao.cli.connecting import pointing_to_stats

    with pointing_to_stats():
        async with access_of(login, token) as access:
            return await mend_counts(access.routes, access.links, counts)
