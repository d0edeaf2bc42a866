"""What the active watcher does, by what it sees."""

from __future__ import annotations

from collections.abc import Sequence

from tao.watcher.mastership import Deed, Sight, next_deed
from tao.watcher.promotion_plan import Member
from tests.unit.watcher.members import master, replica


def deed(
    *members: Member,
    silent: float = 0.0,
    closed: int = 0,
    vouched: bool = False,
    promote: bool = True,
    rejoin: bool = False,
    semi_sync: bool = False,
    acknowledging: Sequence[str] = (),
) -> tuple[Deed, str]:
    return next_deed(
        Sight(members, silent, closed, vouched, semi_sync, acknowledging),
        gone_seconds=5.0,
        auto_promote=promote,
        auto_rejoin=rejoin,
    )


def test_a_healthy_set_needs_nothing() -> None:
    assert deed(master("1-1-1"), replica("west", "1-1-1", receiving=True)) == (Deed.NOTHING, "")


def test_a_master_is_replaced_only_when_it_has_been_silent_for_long() -> None:
    gone = (master(None), replica("west", "1-1-1"))
    assert deed(*gone, silent=4.9)[0] is Deed.NOTHING
    assert deed(*gone, silent=5.0)[0] is Deed.PROMOTE
    assert deed(*gone, silent=500.0, promote=False)[0] is Deed.NOTHING
    assert deed(master(None), silent=500.0)[0] is Deed.NOTHING, "there is nobody to promote"


def test_a_master_that_its_own_region_sees_well_is_cut_off_and_not_lost() -> None:
    assert deed(master(None), replica("west", "1-1-1"), silent=60.0, vouched=True)[0] is Deed.NOTHING


def test_a_master_found_closed_twice_is_opened() -> None:
    closed = (master("1-1-1", closed=True), replica("west", "1-1-1"))
    assert deed(*closed, closed=1)[0] is Deed.NOTHING
    assert deed(*closed, closed=2)[0] is Deed.RESTORE


def test_a_server_that_follows_nobody_is_brought_back_only_where_that_is_wanted() -> None:
    alone = (master("1-1-1"), replica("west", "1-1-1", alone=True))
    assert deed(*alone)[0] is Deed.NOTHING
    assert deed(*alone, rejoin=True) == (Deed.REJOIN, "west-db")
    seeding = replica("west", "", alone=True, seeding=True)
    assert deed(master("1-1-1"), seeding, rejoin=True)[0] is Deed.NOTHING, "somebody is at it"


def test_a_master_waits_again_as_soon_as_there_is_a_replica_to_wait_for() -> None:
    west = replica("west", "1-1-1", receiving=True, acknowledges=True)
    unsafe, there = (master("1-1-1"), west), ("west-db",)
    assert deed(*unsafe, semi_sync=True, acknowledging=there) == (Deed.WAIT, "")
    assert deed(*unsafe, semi_sync=True)[0] is Deed.NOTHING, "every write would stand still"
    assert deed(*unsafe, acknowledging=there)[0] is Deed.NOTHING, "the topology does not want it"
    safe = (master("1-1-1", waits=True), west)
    assert deed(*safe, semi_sync=True, acknowledging=there)[0] is Deed.NOTHING
    closed = (master("1-1-1", closed=True), west)
    assert deed(*closed, closed=2, semi_sync=True, acknowledging=there)[0] is Deed.RESTORE, "which sees to it as well"
    astray = replica("north", "1-1-1", alone=True)
    assert deed(*unsafe, astray, semi_sync=True, acknowledging=there, rejoin=True)[0] is Deed.WAIT, "which is quick"
    assert deed(master(None), west, semi_sync=True, acknowledging=there)[0] is Deed.NOTHING
