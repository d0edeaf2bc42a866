"""Fair shares and budgets against naive models: lists of single items, and of payments, that are searched."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.model.errors import Overloaded, SettingsError
from tao.routing import fair_shares
from tao.routing.fair_shares import Claim, FairShares, ShareSettings, SpendingRates

SETTINGS = ShareSettings(
    turn_cost=3,
    max_under_way=12,
    max_under_way_per_caller=8,
    max_under_way_beside_others=6,
    others_seconds=2.0,
    max_waiting_per_caller=30,
    critical_cost=2,
    max_master_reads_beside_others=3,
)
BUDGETED = "c"
"""The caller whose claims say how much it may have under way."""


def claim_of(caller: str, cost: int) -> Claim:
    return Claim(caller, cost, 7 if caller == BUDGETED else None, reads_master=cost % 2 == 0)


@dataclass
class Naive:
    """The same decisions, with a list for each caller of the claims whose items wait, one entry an item."""

    settings: ShareSettings
    started: list[Claim] = field(default_factory=list)
    aside: list[Claim] = field(default_factory=list)
    waiting: dict[str, list[Claim]] = field(default_factory=dict)
    turns: list[str] = field(default_factory=list)
    deficits: dict[str, int] = field(default_factory=dict)
    parked: dict[str, list[Claim]] = field(default_factory=lambda: {name: [] for name in "abc"})
    """The claims of each caller that wait for the end of an item that reads a master."""
    worked_at: dict[str, float] = field(default_factory=dict)
    """Caller → the time at which it last asked for work, or ended some."""
    time: float = 0.0

    def under_way(self, caller: str | None = None) -> int:
        return sum(claim.cost for claim in self.started if caller in (None, claim.caller))

    def works(self, caller: str) -> bool:
        recently = self.worked_at.get(caller, -99.0) > self.time - self.settings.others_seconds
        return recently or self.under_way(caller) + self.set_aside(caller) > 0 or bool(self.waiting.get(caller))

    def set_aside(self, caller: str | None = None) -> int:
        return sum(claim.cost for claim in self.aside if caller in (None, claim.caller))

    def has_others(self, caller: str) -> bool:
        return any(self.works(each) for each in "abc" if each != caller)

    def bound(self, caller: str) -> int:
        if caller == BUDGETED:
            return 7
        settings = self.settings
        return settings.max_under_way_beside_others if self.has_others(caller) else settings.max_under_way_per_caller

    def master_reads(self, caller: str) -> int:
        return sum(claim.cost for claim in self.started if claim.caller == caller and claim.reads_master)

    def may_read_master(self, claim: Claim, cost: int) -> bool:
        if not claim.reads_master or claim.caller == BUDGETED or not self.has_others(claim.caller):
            return True
        return self.master_reads(claim.caller) + cost <= self.settings.max_master_reads_beside_others

    def in_turn(self, caller: str) -> list[Claim]:
        return [claim for claim in self.waiting.get(caller, ()) if claim not in self.parked[caller]]

    def unpark(self, caller: str) -> None:
        if self.parked[caller]:
            claim = self.parked[caller].pop(0)
            items = [each for each in self.waiting[caller] if each is claim]
            self.waiting[caller] = [each for each in self.waiting[caller] if each is not claim] + items

    def has_room(self, caller: str, cost: int) -> bool:
        return self.under_way() + cost <= self.settings.max_under_way and self.may_have(caller, cost)

    def may_have(self, caller: str, cost: int) -> bool:
        return self.under_way(caller) + cost <= self.bound(caller)

    def add(self, claim: Claim, items: int) -> bool:
        self.worked_at[claim.caller] = self.time
        waiting = self.waiting.setdefault(claim.caller, [])
        has_room = self.has_room(claim.caller, claim.cost * items) and self.may_read_master(claim, claim.cost * items)
        if claim.reads_master and self.parked[claim.caller]:
            has_room = False
        if not self.turns and not self.in_turn(claim.caller) and has_room:
            self.started += [claim] * items
            return True
        waiting_cost = sum(each.cost for each in waiting) + claim.cost * items
        if claim not in self.started + self.aside and waiting_cost > self.settings.max_waiting_per_caller:
            raise Overloaded("too much")
        waiting += [claim] * items
        self.enter(claim.caller)
        return False

    def enter(self, caller: str) -> None:
        if self.in_turn(caller) and caller not in self.turns:
            self.turns.append(caller)

    def leave(self, caller: str) -> None:
        if caller in self.turns:
            self.turns.remove(caller)
        self.deficits[caller] = 0

    def next(self) -> Claim | None:
        while self.turns:
            caller = self.turns[0]
            claim = self.in_turn(caller)[0]
            if self.under_way(caller) and not self.may_have(caller, claim.cost):
                self.leave(caller)
            elif self.master_reads(caller) and not self.may_read_master(claim, claim.cost):
                self.parked[caller].append(claim)
                if not self.in_turn(caller):
                    self.leave(caller)
            elif self.deficits.get(caller, 0) < claim.cost:
                self.deficits[caller] = self.deficits.get(caller, 0) + self.settings.turn_cost
                self.turns.append(self.turns.pop(0))
            elif self.under_way() + claim.cost > self.settings.max_under_way:
                return None
            else:
                self.deficits[caller] -= claim.cost
                rest = list(self.waiting[caller])
                rest.remove(claim)
                same = [each for each in rest if each is claim]
                self.waiting[caller] = [each for each in rest if each is not claim] + same
                self.started.append(claim)
                if not self.in_turn(caller):
                    self.leave(caller)
                return claim
        return None

    def put_aside(self, claim: Claim) -> bool:
        most = 7 if claim.caller == BUDGETED else self.settings.max_under_way_per_caller
        if self.set_aside(claim.caller) and self.set_aside(claim.caller) + claim.cost > most:
            return False
        if self.set_aside() + claim.cost > self.settings.max_under_way:
            return False
        self.end(claim)
        self.aside.append(claim)
        return True

    def end_aside(self, claim: Claim) -> None:
        self.worked_at[claim.caller] = self.time
        self.aside.remove(claim)
        self.enter(claim.caller)

    def end(self, claim: Claim) -> None:
        self.worked_at[claim.caller] = self.time
        self.started.remove(claim)
        if claim.reads_master:
            self.unpark(claim.caller)
        self.enter(claim.caller)

    def withdraw(self, claim: Claim) -> None:
        if claim in self.waiting.get(claim.caller, ()):
            self.worked_at[claim.caller] = self.time
            self.waiting[claim.caller] = [each for each in self.waiting[claim.caller] if each is not claim]
            if claim in self.parked[claim.caller]:
                self.parked[claim.caller].remove(claim)
            elif claim.reads_master:
                self.unpark(claim.caller)
                self.enter(claim.caller)
            if not self.in_turn(claim.caller):
                self.leave(claim.caller)


ADD = st.tuples(st.just("add"), st.sampled_from("abc"), st.tuples(st.integers(1, 6), st.integers(1, 6)))
ADD_MORE = st.tuples(st.just("add more"), st.just(""), st.tuples(st.integers(1, 30), st.integers(1, 3)))
END = st.tuples(st.just("end"), st.just(""), st.tuples(st.integers(0, 30), st.just(0)))
PUT_ASIDE = st.tuples(st.just("put aside"), st.just(""), st.tuples(st.integers(0, 30), st.just(0)))
END_ASIDE = st.tuples(st.just("end aside"), st.just(""), st.tuples(st.integers(0, 30), st.just(0)))
WITHDRAW = st.tuples(st.just("withdraw"), st.just(""), st.tuples(st.integers(0, 30), st.just(0)))
PASS_TIME = st.tuples(st.just("pass time"), st.just(""), st.tuples(st.integers(1, 3), st.just(0)))


@given(st.lists(st.one_of(ADD, ADD_MORE, END, END, PUT_ASIDE, END_ASIDE, WITHDRAW, PASS_TIME), max_size=80))
def test_fair_shares_decide_as_lists_of_items_would(steps: list[tuple[str, str, tuple[int, int]]]) -> None:
    naive, claims = Naive(SETTINGS), list[Claim]()
    shares = FairShares(SETTINGS, lambda: naive.time)
    for step, caller, (first, second) in steps:
        if step in ("add", "add more"):
            more = step == "add more" and claims
            claim = claims[first % len(claims)] if more else claim_of(caller or "a", min(first, 6))
            outcomes: list[bool | None] = []
            for decider in (shares, naive):
                try:
                    outcomes.append(decider.add(claim, second))
                except Overloaded:
                    outcomes.append(None)
            assert outcomes[0] == outcomes[1]
            claims.append(claim)
        elif step == "end" and naive.started:
            ended = naive.started[first % len(naive.started)]
            shares.end(ended)
            naive.end(ended)
        elif step == "put aside" and naive.started:
            paused = naive.started[first % len(naive.started)]
            assert shares.put_aside(paused) == naive.put_aside(paused)
        elif step == "end aside" and naive.aside:
            ended = naive.aside[first % len(naive.aside)]
            shares.end(ended, was_set_aside=True)
            naive.end_aside(ended)
        elif step == "pass time":
            naive.time += first
        elif step == "withdraw" and claims:
            shares.withdraw(claims[first % len(claims)])
            naive.withdraw(claims[first % len(claims)])
        while (started := shares.next()) is not None:
            assert started is naive.next()
        assert naive.next() is None
        assert shares.under_way == naive.under_way() <= SETTINGS.max_under_way
        assert shares.set_aside == naive.set_aside() <= SETTINGS.max_under_way
        assert shares.waiting == sum(each.cost for waiting in naive.waiting.values() for each in waiting)
        for name in "abc":
            assert naive.under_way(name) <= SETTINGS.max_under_way_per_caller
            assert naive.set_aside(name) <= SETTINGS.max_under_way_per_caller
        with_work = {each.caller for each in naive.started + naive.aside}
        with_work |= {name for name, each in naive.waiting.items() if each}
        assert shares.callers == len(with_work)
    # Nothing waits for ever, whatever was set aside: what is under way ends, and each end lets the next begin.
    while naive.started:
        shares.end(naive.started[0])
        naive.end(naive.started[0])
        while shares.next() is not None:
            assert naive.next() is not None
    assert shares.waiting == 0


def started_now(shares: FairShares) -> list[Claim]:
    """Return the claims of which an item starts, one entry an item."""
    return list(iter(shares.next, None))


@given(st.integers(1, 6), st.integers(1, 6))
def test_callers_that_wait_are_served_the_same_cost_to_within_a_turn_and_two_items(first: int, second: int) -> None:
    most = SETTINGS.max_under_way
    settings = replace(SETTINGS, max_under_way_per_caller=most, max_under_way_beside_others=most)
    shares = FairShares(settings, lambda: 0.0)
    filler, a, b = Claim("other", 12), Claim("a", first), Claim("b", second)
    assert shares.add(filler, 1)
    for claim in (a, b):
        assert not shares.add(claim, SETTINGS.max_waiting_per_caller // claim.cost)
    shares.end(filler)
    served = {"a": 0, "b": 0}
    running: list[Claim] = []
    while True:
        started = started_now(shares)
        for claim in started:
            served[claim.caller] += claim.cost
        if not a.waiting or not b.waiting:
            return
        assert abs(served["a"] - served["b"]) <= SETTINGS.turn_cost + 2 * max(first, second)
        running += started
        shares.end(running.pop(0))


def test_a_caller_whose_work_hangs_leaves_room_for_the_others() -> None:
    shares = FairShares(SETTINGS, lambda: 0.0)
    hanging = Claim("hog", 1)
    assert not shares.add(hanging, 30)
    assert started_now(shares) == [hanging] * 8
    assert shares.add(Claim("honest", 2), 2)
    with pytest.raises(Overloaded, match="waits with work of cost 22 already"):
        shares.add(Claim("hog", 1), 9)


def test_what_is_set_aside_leaves_its_place_to_its_caller_s_other_work_and_is_bounded() -> None:
    shares = FairShares(SETTINGS, lambda: 0.0)
    failing, healthy = Claim("app", 4), Claim("app", 1)
    assert shares.add(failing, 2)
    assert not shares.add(healthy, 8)
    assert started_now(shares) == []
    assert shares.put_aside(failing)
    assert started_now(shares) == [healthy] * 4
    assert shares.put_aside(failing)
    assert started_now(shares) == [healthy] * 4
    assert not shares.put_aside(healthy)
    shares.end(failing, was_set_aside=True)
    assert shares.put_aside(healthy)
    assert (shares.under_way, shares.set_aside) == (7, 5)


def test_a_caller_is_known_while_work_of_it_is_set_aside() -> None:
    time = 0.0
    shares = FairShares(SETTINGS, lambda: time)
    paused, other = Claim("app", 1), Claim("other", 1)
    assert shares.add(paused, 1)
    assert shares.put_aside(paused)
    time = 100.0
    assert not shares.add(other, 7)
    assert shares.callers == 2
    shares.end(paused, was_set_aside=True)
    assert shares.callers == 1


def test_a_caller_has_less_under_way_beside_others_until_they_have_been_idle_for_long_enough() -> None:
    time = 0.0
    shares = FairShares(SETTINGS, lambda: time)
    hog, honest = Claim("hog", 1), Claim("honest", 1)
    assert shares.add(honest, 1)
    assert not shares.add(hog, 30)
    assert len(started_now(shares)) == 6
    shares.end(honest)
    time = 1.9
    shares.end(hog)
    assert len(started_now(shares)) == 1
    time = 2.0
    shares.end(hog)
    assert len(started_now(shares)) == 3
    assert hog.under_way == 8


def test_critical_reads_of_masters_here_have_a_smaller_bound_beside_others_and_do_not_hold_up_other_reads() -> None:
    shares = FairShares(SETTINGS, lambda: 0.0)
    honest, critical = Claim("honest", 1), Claim("hog", 2, reads_master=True)
    elsewhere, miss = Claim("hog", 2), Claim("hog", 1)
    assert shares.add(honest, 1)
    assert not shares.add(critical, 3)
    assert started_now(shares) == [critical]
    assert shares.add(elsewhere, 1)
    assert shares.add(miss, 1)
    shares.end(critical)
    assert started_now(shares) == [critical]


def test_a_parked_claim_goes_on_when_the_one_that_was_to_go_before_it_is_withdrawn() -> None:
    shares = FairShares(SETTINGS, lambda: 0.0)
    running, first, second = (Claim("hog", 2, reads_master=True) for _ in range(3))
    assert shares.add(Claim("honest", 1), 1)
    assert shares.add(running, 1)
    for claim in (first, second):
        assert not shares.add(claim, 1)
    assert started_now(shares) == []
    shares.end(running)
    shares.withdraw(first)
    assert started_now(shares) == [second]


def test_a_caller_that_is_alone_reads_as_much_from_masters_as_its_bound_lets_it() -> None:
    shares = FairShares(SETTINGS, lambda: 0.0)
    assert shares.add(Claim("alone", 2, reads_master=True), 4)


def test_a_caller_whose_bound_has_become_less_than_one_item_costs_does_one_at_a_time() -> None:
    shares = FairShares(SETTINGS, lambda: 0.0)
    earlier, costly = Claim("a", 6), Claim("a", 6)
    assert shares.add(earlier, 1)
    assert not shares.add(costly, 2)
    assert not shares.add(Claim("a", 1, 3), 1)
    shares.end(earlier)
    assert started_now(shares) == [costly]


def test_reads_are_taken_to_cost_what_the_latest_of_their_caller_have_cost() -> None:
    shares = FairShares(SETTINGS, lambda: 0.0)
    pages = Claim("pages", 1)
    shares.add(pages, 1)
    assert shares.read_units("pages") == 1
    for units in (40, 1):
        for _ in range(200):
            shares.end(pages, read_units=units)
            shares.add(pages, 1)
        assert shares.read_units("pages") == units
    assert shares.read_units("others") == 1


def test_the_requests_of_one_caller_take_turns() -> None:
    shares = FairShares(SETTINGS, lambda: 0.0)
    earlier, large, small = (Claim("a", cost) for cost in (8, 1, 1))
    assert shares.add(earlier, 1)
    assert not shares.add(large, 20)
    assert not shares.add(small, 2)
    shares.end(earlier)
    assert [claim is small for claim in started_now(shares)] == [False, True, False, True, False, False, False, False]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 30), st.integers(0, 20)), max_size=60))
def test_a_budget_lets_a_caller_spend_again_when_all_but_one_second_s_worth_is_paid(
    steps: list[tuple[str, int, int]],
) -> None:
    """The naive model pays a unit of the oldest debt in each tick of a tenth of a second."""
    ticks, owed = 0, {"a": 0, "b": 0}
    rates = SpendingRates(lambda: ticks / 10)
    for caller, cost, pause in steps:
        allowed = owed[caller] <= 10
        assert (rates.seconds_to_wait(caller) < 1e-9) == allowed
        if allowed:
            rates.spend(caller, cost, per_second=10)
            owed[caller] += cost
        ticks += pause
        owed = {name: max(0, left - pause) for name, left in owed.items()}


def test_what_callers_have_spent_is_kept_for_a_bounded_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_shares, "MAX_SPENDERS", 3)
    time = 0.0
    rates = SpendingRates(lambda: time)
    for cost, name in enumerate("abcd", 20):
        rates.spend(name, cost, per_second=10)
    assert len(rates) == 3
    assert [rates.seconds_to_wait(name) > 0 for name in "abcd"] == [False, True, True, True]
    time = 2.2
    rates.spend("e", 1, per_second=10)
    assert len(rates) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"turn_cost": 0},
        {"max_under_way_per_caller": 9_000},
        {"max_under_way": 0},
        {"max_under_way_beside_others": 1},
        {"max_master_reads_beside_others": 1},
        {"critical_cost": 200},
        {"bytes_per_unit": 0},
    ],
)
def test_bounds_that_nothing_could_start_under_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(SettingsError):
        ShareSettings(**wrong)
