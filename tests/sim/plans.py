"""A plan: everything that will happen in a run, made from one number.

A run is a sequence of *acts*. In each, clients work and faults happen for a while; then the faults are ended, nothing
is written, and everything must become equal again. Operations come in bursts on few keys, because that is where races
are. Plans are plain data: they can be printed, stored, cut down (`tests.sim.shrinking`) and played again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final

import msgspec

EPISODE_SECONDS: Final = 40.0
EPISODES: Final = 3
"""Episodes in an act: the operations and faults of an episode happen close together."""
LOOK_SECONDS: Final = 5.0
"""Seconds at the beginning of an act for reading what the act before has left."""
GOT_OVER_SECONDS: Final = 18.0
"""Seconds from the end of a fault to the next one, where one fault comes at a time."""
REPLACED_SECONDS: Final = 8.0
"""Longest time from the death of a leader until its shards' writes succeed again, where watchers run: at the
simulation's intervals of probes."""
KEYS: Final = 12
"""Number of objects that the operations use."""
UNREAD_KEYS: Final = 240
"""Number of objects with those that nobody writes and hardly anybody has read: no cache has them."""

READS: Final = ("obj_get", "assoc_get", "assoc_count", "assoc_range", "assoc_time_range")
WRITES: Final = (
    *("obj_add", "obj_add_reserved", "obj_put", "obj_update", "obj_delete"),
    *("assoc_add", "assoc_delete", "assoc_change_type"),
)
_WRITE_WEIGHTS: Final = (1, 1, 2, 3, 1, 9, 4, 2)
MANY_READS: Final = tuple(f"{kind}_many" for kind in READS)
SET_READ: Final = "edge_set"
_OFTEN_SETS: Final = ("assoc_count", "assoc_count_many", "obj_get_many")
"""Half of these reads are sets instead, without another random number: so a seed keeps its faults."""
MANY_WRITES: Final = ("obj_put_many", "assoc_add_many", "assoc_delete_many")
_MANY: Final = 0.15
"""Share of the operations that use several keys at once."""
_HOW: Final = ("", "token", "tokens", "critical", "stale")
_HOW_WEIGHTS: Final = (10, 4, 1, 3, 3)
STATE_KINDS: Final = ("assoc_set_state", "assoc_range_of_state", "node_set_state")
STATE_TYPES: Final = ("subscribes", "subscribers")
"""Types with states. Their operations are drawn apart, so that the others are the same with and without them."""
LATER_SET_STATE: Final = "later_set_state"
"""An operation on an edge with states that a follower's journal accepts."""
TWO_HOP: Final = "two_hop"
"""A question for two hops. These are drawn apart, as operations of states are."""
MEMBERS: Final = "members"
"""The question which of all keys a list has, always in the same words. These are drawn apart, too."""
COUNTER_KINDS: Final = ("counter_add", "counter_get", "fold_counter")
"""Additions to counters, reads and folds of them. They are drawn apart, too."""
ADD_JOB: Final = "add_job"
MOST_ADDED: Final = 2
"""The most shards that are added at once, at most twice in a plan."""
KILL_WORKER: Final = "kill worker"
ADD_SHARDS: Final = "add shards"
EDGE_TYPES: Final = ("friend", "likes", "liked_by", "follows", "comment", "note")


class Tempo(msgspec.Struct, frozen=True):
    """How an act fills its time.

    It has as many operations and faults at any tempo; in the quiet stretches between its episodes version floors are
    dropped and back-offs end, and caches become equal if they can already.
    """

    quiet_seconds: float = 0.0
    """Quiet time between two episodes."""
    calm_seconds: float = 90.0
    """Longer than recovery takes: a session's silence, an intent's age for repair, and several retries at the run's
    pace."""
    pace: float = 1.0
    """Factor on the seconds between the periodic jobs of `tests.sim.roles`."""

    @property
    def busy_seconds(self) -> float:
        """Time from the start of an act until all faults have ended."""
        return EPISODES * EPISODE_SECONDS + (EPISODES - 1) * self.quiet_seconds

    @property
    def act_seconds(self) -> float:
        return self.busy_seconds + self.calm_seconds

    def episode_at(self, episode: int) -> float:
        """Return when an episode begins, in seconds since the act began."""
        return episode * (EPISODE_SECONDS + self.quiet_seconds)

    def when(self, rng: random.Random, until_end: float = 0.0) -> float:
        """A moment in an episode, in seconds since the act began; ``until_end``: at least, of them all."""
        seconds = rng.uniform(LOOK_SECONDS, EPISODES * EPISODE_SECONDS - until_end)
        return seconds + min(EPISODES - 1, seconds // EPISODE_SECONDS) * self.quiet_seconds


class Shape(msgspec.Struct, frozen=True):
    """The size of the world: one or two regions, two databases, one or two follower tiers in each region, and the
    number of servers of each tier."""

    regions: int = 2
    leaders: int = 1
    tiers: int = 2
    followers: int = 1
    shards: int = 4
    clients: int = 2
    arena_bytes: int = 1 << 20
    reads_databases: bool = False
    """Whether followers have accounts at the databases, for when no leader can be asked."""
    watchers: int = 0
    """The watchers of each region."""
    etcd: bool = False
    """Whether the topology and the locks are in etcd."""
    workers: int = 0
    """The workers of each region."""
    has_short_prefixes: bool = False
    """Whether caches keep few edges of a list, as they do for some seeds of any shape."""

    @property
    def all_clients(self) -> int:
        """The number of clients of all regions."""
        return self.regions * self.clients


class Op(msgspec.Struct, frozen=True):
    """One operation of client number ``client``.

    ``one`` and ``two`` name keys; ``value`` is a time, field or limit; ``how`` is "", ``critical``, ``stale`` (bounded
    staleness), ``token`` (of a write of any client) or ``tokens`` (of all recent writes).
    """

    at: float
    client: int
    kind: str
    one: int
    two: int
    atype: str
    value: int
    how: str = ""


class Fault(msgspec.Struct, frozen=True):
    """One fault, which begins ``at`` and lasts ``seconds``. ``pick`` and ``other`` choose its targets."""

    at: float
    kind: str
    pick: int
    other: int
    seconds: float


class Plan(msgspec.Struct, frozen=True):
    """A run's plan. ``acts`` follow each other; times count from the start of the first."""

    seed: int
    acts: int
    shape: Shape
    ops: tuple[Op, ...]
    faults: tuple[Fault, ...]
    tempo: Tempo = Tempo()


def first_acts(plan: Plan, acts: int) -> Plan:
    """Return a plan that ends after so many acts of another."""
    end = acts * plan.tempo.act_seconds
    return msgspec.structs.replace(
        plan,
        acts=acts,
        ops=tuple(each for each in plan.ops if each.at < end),
        faults=tuple(each for each in plan.faults if each.at < end),
    )


TEMPOS: Final = (
    Tempo(),
    Tempo(120.0, 180.0, pace=3.0),
    Tempo(240.0, 300.0, pace=5.0),
    Tempo(540.0, 360.0, pace=8.0),
    Tempo(),
    Tempo(120.0, 180.0, pace=3.0),
    Tempo(240.0, 300.0, pace=5.0),
    Tempo(pace=0.5),
)
"""Frequent jobs are most of what happens, so the time is short where they are frequent."""
MEAN_ACT_SECONDS: Final = sum(each.act_seconds for each in TEMPOS) / len(TEMPOS)
FAULT_WEIGHTS: Final = {
    "kill": 4,
    "pause": 3,
    "drain": 1,
    "cut server": 2,
    "cut pair": 3,
    "cut one way": 1,
    "cut regions": 1,
    "break": 3,
    "slow": 2,
    "lag": 2,
    "replication stops": 1,
    "commit fault": 4,
    "database down": 1,
    "move shard": 3,
    "mark down": 1,
    "replaced unseen": 1,
    "foreign write": 2,
    "kill tailer": 2,
    "tailer cut off": 1,
    "binlog lost": 1,
    "there and back": 1,
    "depose": 1,
    "spool needed": 2,
    "disk full": 1,
    "promotion": 1,
    "topology late": 1,
    "master lost": 2,
    "clone": 3,
    "planned restart": 2,
    "move to database": 3,
    "move dies": 1,
    "rush": 2,
    "kill watcher": 1,
    "watcher hangs": 1,
    "watcher cut off": 1,
    "master cut off": 1,
}
ETCD_GONE: Final = ("etcd away", "etcd cut off")
OF_ETCD: Final = (*ETCD_GONE, "etcd compacted")
"""Failures of etcd, which servers go on without. They take the place of other faults in plans that have an etcd."""
_ETCD_SHARE: Final = 0.25
"""Share of the plans that have one."""
_OF_ETCD_SHARE: Final = 0.3
PLANNED: Final = ("clone", "planned restart")
"""Actions of operators on a healthy cluster: no request may fail because of them."""
OF_WATCHERS: Final = ("kill watcher", "watcher hangs", "watcher cut off")
"""Failures of watchers, which do nothing but keep leases and replace what is gone."""
UNNOTICED: Final = ("clone", "depose")
"""Faults that take no server away, or not at once."""
RESTORE: Final = "restore"
RESTORE_UNPROMOTED: Final = "restore unpromoted"
RESTORE_AGAIN: Final = "restore again"
RESTORES: Final = (RESTORE, RESTORE_UNPROMOTED, RESTORE_AGAIN)
"""A loss of everything, and a restore of a backup; of one from before a master was lost and replaced; and two restores
of one backup. Only plans that ask for them have them."""
COMPOUND: Final = ("spool needed", "rush", "binlog lost", "restart between writes", "topology late", *RESTORES)
"""Faults that consist of several failures."""
UNSEEN_SECONDS: Final = 8.0
"""Duration of "replaced unseen": others receive what is written meanwhile, and give the shards back in time."""
_WHILE_WRITING: Final = (
    *("master lost", "topology late", "binlog lost", "spool needed", "clone", "replaced unseen"),
    *("move to database", "move dies"),
)
"""Faults that have no effect without writes."""
SEQUENCES: Final = ("split database", "balance databases")
"""Several moves by one command. In some plans they take the place of single moves."""
_SEQUENCES_SHARE: Final = 0.2
OF_DATABASES: Final = ("move to database", "move dies", *SEQUENCES)
MOVE_SECONDS: Final = 11.0
"""About how long a move to another database takes."""
_OPS_OF_MOVE: Final = 24
_EDGES_OF_BACKUP: Final = 12
_RESTORE_SECONDS: Final = {RESTORE: 0.0, RESTORE_UNPROMOTED: 20.0, RESTORE_AGAIN: 80.0}
"""How long before the end of the busy part of an act such a fault begins at the latest."""
_UNKNOWN_IDS_SECONDS: Final = {RESTORE_UNPROMOTED: 60, RESTORE_AGAIN: 110}
"""Time from a backup until the cluster that is restored last gives out ids."""
_MASTERS: Final = ("promotion", "topology late", "master lost")
_OF_SHARDS: Final = ("move shard", "there and back", "binlog lost", "clone", "move to database", "move dies")


def tempo_of(seed: int) -> Tempo:
    """Return the tempo of a seed: seeds take all tempos in turn."""
    return TEMPOS[seed % len(TEMPOS)]


_SHAPES: Final = (
    Shape(),
    Shape(leaders=2),
    Shape(leaders=2, followers=2, shards=8, reads_databases=True),
    Shape(leaders=2, reads_databases=True),
    Shape(leaders=2, followers=2, shards=4, arena_bytes=4096),
    Shape(followers=2, reads_databases=True),
    Shape(leaders=2, reads_databases=True, watchers=1),
    Shape(regions=1, leaders=2, followers=2, reads_databases=True, watchers=2),
)


def make_plan(
    seed: int,
    acts: int,
    shape: Shape | None = None,
    kinds: Mapping[str, int] | None = None,
    tempo: Tempo = Tempo(),  # noqa: B008 - it is immutable
    single_share: float = 0.4,
    *,
    with_states: bool = True,
    with_jobs: bool = True,
    with_journals: bool = True,
    with_growth: bool = True,
    with_counters: bool = True,
    two_hop_share: float = 0.05,
    members_share: float = 0.05,
) -> Plan:
    """Make the plan of a seed.

    ``kinds`` are the faults and their weights (default: all faults). ``single_share`` is the share of acts in which one
    fault at a time is under way. ``with_states``: clients set states of edges, too. ``with_jobs``: every other seed has
    workers, and clients add jobs. ``with_journals``: every third seed has journals, and clients use them.
    ``with_growth``: in every fifth seed an operator adds shards. ``with_counters``: clients count, too.
    ``two_hop_share`` and ``members_share``: such questions by clients, for each other operation.
    """
    rng = random.Random(seed)
    is_drawn = shape is None
    shape = shape or rng.choice(_SHAPES)
    ops, faults = _acts(rng, shape, FAULT_WEIGHTS if kinds is None else kinds, acts, tempo, single_share)
    if kinds is None:
        faults = _with_sequences(random.Random(f"sequences {seed}"), faults)
    ops += _move_ops(random.Random(f"moves {seed}"), faults, shape)
    if with_states:
        ops += _state_ops(random.Random(f"states {seed}"), ops, shape)
    if with_jobs and seed % 2 == 0:
        shape = msgspec.structs.replace(shape, workers=2)
        ops += _job_ops(random.Random(f"jobs {seed}"), ops, shape)
    if with_journals and seed % 3 == 0:
        ops += _journal_ops(random.Random(f"journals {seed}"), ops, shape)
    if with_growth and seed % 5 == 1:
        ops += _growth_ops(random.Random(f"growth {seed}"), ops)
    if with_counters:
        ops += _counter_ops(random.Random(f"counters {seed}"), ops, shape)
    ops += _two_hop_ops(random.Random(f"two hops {seed}"), ops, shape, two_hop_share)
    ops += _members_ops(random.Random(f"members {seed}"), ops, shape, members_share)
    if is_drawn:
        shape, faults = _with_etcd(random.Random(f"etcd {seed}"), shape, faults, may_fail=kinds is None)
    ops.sort(key=lambda op: op.at)
    return Plan(seed, acts, shape, tuple(ops), tuple(sorted(faults, key=lambda fault: fault.at)), tempo)


def _acts(
    rng: random.Random, shape: Shape, weights: Mapping[str, int], acts: int, tempo: Tempo, single_share: float
) -> tuple[list[Op], list[Fault]]:
    """Draw the faults of all acts, and most operations."""
    ops: list[Op] = []
    faults: list[Fault] = []
    for act in range(acts):
        begin = act * tempo.act_seconds
        for _ in range(rng.randint(6, 10)):
            ops += _burst(rng, begin + tempo.when(rng, until_end=5.0), shape)
        if weights and single_share and rng.random() < single_share:
            for fault in _single_faults(rng, begin, weights, tempo):
                faults.append(fault)
                ops += _around(rng, fault, shape)
            continue
        for _ in range(rng.randint(0, 6) if weights else 0):
            kind = rng.choices(list(weights), list(weights.values()))[0]
            at, pick = begin + tempo.when(rng), rng.randrange(1000)
            if rng.random() < 0.7:
                # Most operations meet their fault in the middle of something; those about a shard use the shard of the
                # fault.
                near = rng.choice(ops)
                at = near.at + rng.uniform(-0.05, 0.3)
                pick = near.one if kind in _OF_SHARDS else pick
            if begin + LOOK_SECONDS <= at < begin + tempo.busy_seconds - _RESTORE_SECONDS.get(kind, 0.0):
                fault = Fault(at, kind, pick, rng.randrange(1000), _seconds(rng, tempo.busy_seconds / 3))
                faults.append(fault)
                ops += _beside(rng, fault, shape)
    return ops, faults


def _with_etcd(rng: random.Random, shape: Shape, faults: list[Fault], *, may_fail: bool) -> tuple[Shape, list[Fault]]:
    """Put the documents of a share of the plans into etcd, and let some of their faults befall that.

    Only plans whose shape is drawn have it by chance.
    """
    if rng.random() >= _ETCD_SHARE:
        return shape, faults
    befall = [
        msgspec.structs.replace(each, kind=rng.choice(OF_ETCD)) if may_fail and rng.random() < _OF_ETCD_SHARE else each
        for each in faults
    ]
    return msgspec.structs.replace(shape, etcd=True), befall


def _with_sequences(rng: random.Random, faults: list[Fault]) -> list[Fault]:
    """Let some of the moves be of several shards."""
    return [
        msgspec.structs.replace(each, kind=rng.choice(SEQUENCES))
        if each.kind in OF_DATABASES and rng.random() < _SEQUENCES_SHARE
        else each
        for each in faults
    ]


def _single_faults(rng: random.Random, begin: float, weights: Mapping[str, int], tempo: Tempo) -> list[Fault]:
    """Yield one fault an episode, ended so long before the next that its aftermath is over."""
    kinds = {kind: weight for kind, weight in weights.items() if kind not in COMPOUND}
    faults: list[Fault] = []
    for episode in range(EPISODES if kinds else 0):
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        at = tempo.episode_at(episode) + rng.uniform(LOOK_SECONDS, 2 * LOOK_SECONDS)
        is_last = episode == EPISODES - 1
        until = tempo.busy_seconds if is_last else tempo.episode_at(episode + 1) + LOOK_SECONDS - GOT_OVER_SECONDS
        seconds = _seconds(rng, until - at)
        faults.append(Fault(begin + at, kind, rng.randrange(1000), rng.randrange(1000), seconds))
    return faults


def _beside(rng: random.Random, fault: Fault, shape: Shape) -> list[Op]:
    """Yield operations at the time of a fault that may meet others."""
    ops = _burst(rng, fault.at, shape) if fault.kind in _WHILE_WRITING else []
    if fault.kind in _MASTERS:
        ops += _token_reads(rng, fault.at, shape)
    if fault.kind == "move shard":
        ops += _reservations(rng, fault.at, fault.pick % shape.shards, shape)
    return ops


def _around(rng: random.Random, fault: Fault, shape: Shape) -> list[Op]:
    """Yield operations at the beginning of a fault, while it lasts, and after it: mostly plain reads of what is written
    and of what no cache has."""
    ops = _token_reads(rng, fault.at, shape) if fault.kind in _MASTERS else []
    ops += _burst(rng, fault.at, shape)
    if shape.watchers and fault.seconds > REPLACED_SECONDS:
        ops += _burst(rng, fault.at + rng.uniform(REPLACED_SECONDS, fault.seconds), shape)
    for at in (fault.at, fault.at + rng.random() * fault.seconds, fault.at + fault.seconds):
        when = at + rng.uniform(-0.1, 1.0)
        for client in rng.sample(range(shape.all_clients), 2):
            one, unread, atype = rng.randrange(KEYS), rng.randrange(KEYS, UNREAD_KEYS), rng.choice(EDGE_TYPES)
            for kind, key in ((rng.choice((*READS, *MANY_READS)), one), (rng.choice(READS), unread)):
                ops.append(Op(when, client, kind, key, (one + 1) % KEYS, atype, rng.randrange(1, 40)))
    return ops


def _seconds(rng: random.Random, longest: float) -> float:
    return rng.choice([rng.uniform(0.05, 0.5), rng.uniform(0.5, 5.0), rng.uniform(5.0, longest)])


def _burst(rng: random.Random, at: float, shape: Shape) -> list[Op]:
    """Yield some operations on two or three keys within a moment."""
    keys = rng.sample(range(KEYS), rng.choice([2, 2, 3]))
    atype = rng.choice(EDGE_TYPES)
    length = rng.choice([0.02, 0.2, 2.0])
    clients = rng.sample(range(shape.all_clients), rng.randint(1, shape.all_clients))
    return [_op(rng, at + rng.random() * length, rng.choice(clients), keys, atype) for _ in range(rng.randint(3, 9))]


def _op(rng: random.Random, at: float, client: int, keys: list[int], atype: str) -> Op:
    one, two = rng.sample(keys, 2)
    if rng.random() < 0.15:
        atype = rng.choice(EDGE_TYPES)
    many = rng.random() < _MANY
    if rng.random() < 0.5:
        kind = rng.choice(MANY_WRITES) if many else rng.choices(WRITES, _WRITE_WEIGHTS)[0]
        if rng.random() < 0.5:
            # Both ends of a pair often write the same edge.
            one, two = keys[0], keys[1]
        return Op(at, client, kind, one, two, atype, rng.randrange(1, 40))
    how = rng.choices(_HOW, _HOW_WEIGHTS)[0]
    kind, value = rng.choice(MANY_READS if many else READS), rng.randrange(1, 40)
    if kind in _OFTEN_SETS and value % 2:
        kind = SET_READ
    return Op(at, client, kind, one, two, atype, value, how)


def _state_ops(rng: random.Random, ops: list[Op], shape: Shape) -> list[Op]:
    """Yield operations on edges with states, and reads of their lists, at the time of a tenth of the others."""
    found: list[Op] = []
    for near in rng.sample(ops, len(ops) // 10):
        keys = rng.sample(range(KEYS), 2)
        for _ in range(rng.randint(1, 4)):
            one, two = keys if rng.random() < 0.8 else reversed(keys)
            is_write = rng.random() < 0.7
            kind = STATE_KINDS[1] if not is_write else STATE_KINDS[0 if rng.random() < 0.9 else 2]
            how = "" if is_write else rng.choices(_HOW, _HOW_WEIGHTS)[0]
            at, client = near.at + rng.random() * 0.2, rng.randrange(shape.all_clients)
            found.append(Op(at, client, kind, one, two, STATE_TYPES[one > two], rng.randrange(1, 40), how))
    return found


def _job_ops(rng: random.Random, ops: list[Op], shape: Shape) -> list[Op]:
    """Yield insertions of jobs at the time of some other operations, and deaths of workers soon after some of them."""
    found: list[Op] = []
    for near in rng.sample(ops, max(4, len(ops) // 25)):
        one, client = rng.randrange(KEYS), rng.randrange(shape.all_clients)
        found.append(Op(near.at, client, ADD_JOB, one, one, "friend", rng.randrange(1, 40)))
        if rng.random() < 0.5:
            at, worker = near.at + rng.random() * 3.0, rng.randrange(1000)
            found.append(Op(at, client, KILL_WORKER, worker, worker, "friend", rng.randrange(1, 40)))
    return found


def _journal_ops(rng: random.Random, ops: list[Op], shape: Shape) -> list[Op]:
    """Yield bursts of operations for the journals at the time of a tenth of the others."""
    found: list[Op] = []
    for near in rng.sample(ops, len(ops) // 10):
        one, two = rng.sample(range(KEYS), 2)
        for _ in range(rng.randint(1, 6)):
            at, client = near.at + rng.random() * 0.3, rng.randrange(shape.all_clients)
            atype, value = STATE_TYPES[one > two], rng.randrange(1, 40)
            found.append(Op(at, client, LATER_SET_STATE, one, two, atype, value))
            if rng.random() < 0.3:
                one, two = two, one
    return found


def _growth_ops(rng: random.Random, ops: list[Op]) -> list[Op]:
    """Yield one or two additions of shards in the middle of other operations."""
    found: list[Op] = []
    for near in rng.sample(ops, rng.randint(1, 2)):
        dies, count = rng.randrange(1000), rng.randint(1, MOST_ADDED)
        found.append(Op(near.at, 0, ADD_SHARDS, dies, count, near.atype, rng.randrange(1, 40)))
    return found


def _counter_ops(rng: random.Random, ops: list[Op], shape: Shape) -> list[Op]:
    """Yield bursts of additions to a few counters at the time of a tenth of the others, among them folds and reads."""
    found: list[Op] = []
    for near in rng.sample(ops, len(ops) // 10):
        one = rng.randrange(KEYS // 3)
        for _ in range(rng.randint(1, 6)):
            kind = rng.choices(COUNTER_KINDS, (6, 1, 2))[0]
            at, client = near.at + rng.random() * 3.0, rng.randrange(shape.all_clients)
            found.append(Op(at, client, kind, one, one, "friend", rng.randrange(1, 40)))
    return found


def _two_hop_ops(rng: random.Random, ops: list[Op], shape: Shape, share: float) -> list[Op]:
    """Yield questions for two hops soon after a share of the others, from what these have written."""
    found: list[Op] = []
    for near in rng.sample(ops, int(len(ops) * share)):
        how = rng.choices(_HOW, _HOW_WEIGHTS)[0]
        at, client = near.at + rng.random() * 0.3, rng.randrange(shape.all_clients)
        one, value, atype = near.one % KEYS, rng.randrange(1, 40), rng.choice(EDGE_TYPES)
        found.append(Op(at, client, TWO_HOP, one, (one + 1 + value) % KEYS, atype, value, how))
    return found


def _members_ops(rng: random.Random, ops: list[Op], shape: Shape, share: float) -> list[Op]:
    """Yield questions for the members of lists soon after a share of the others, some of them twice in a row."""
    found: list[Op] = []
    for near in rng.sample([op for op in ops if op.atype in EDGE_TYPES], int(len(ops) * share)):
        how = rng.choices(_HOW, _HOW_WEIGHTS)[0]
        client = rng.randrange(shape.all_clients)
        for delay in (0.0, 0.5)[: rng.randint(1, 2)]:
            at = near.at + delay + rng.random() * 0.3
            found.append(Op(at, client, MEMBERS, near.one % KEYS, near.two % KEYS, near.atype, near.value, how))
    return found


def _move_ops(rng: random.Random, faults: list[Fault], shape: Shape) -> list[Op]:
    """Yield operations on the objects of shards that move between databases, from the copy to after the switch, and on
    any from a backup to after its restore."""
    found: list[Op] = []
    for fault in faults:
        if fault.kind in RESTORES:
            found += _restore_ops(rng, fault, shape)
        keys = [key for key in range(KEYS) if key % shape.shards == fault.pick % shape.shards]
        for _ in range(_OPS_OF_MOVE if fault.kind in OF_DATABASES and keys else 0):
            others = rng.sample(range(KEYS), 2)
            at, client = fault.at + rng.random() * MOVE_SECONDS, rng.randrange(shape.all_clients)
            some = list(dict.fromkeys((rng.choice(keys), *others)))
            found.append(_op(rng, at, client, some, rng.choice(EDGE_TYPES)))
    return found


def _restore_ops(rng: random.Random, fault: Fault, shape: Shape) -> list[Op]:
    """Yield edges that are added while the databases are backed up one after the other, reservations of ids until after
    the restore, and reads with tokens of what is lost."""
    one = fault.pick % shape.shards
    found = _reservations(rng, fault.at + 2.0, one, shape) + _reservations(rng, fault.at + 12.0, one, shape)
    # While a promoted master, a restored cluster and the next one serve.
    for after in range(10, _UNKNOWN_IDS_SECONDS.get(fault.kind, 0), 5):
        found += _reservations(rng, fault.at + after, one, shape)
    for _ in range(_EDGES_OF_BACKUP):
        one, two = rng.sample(range(KEYS), 2)
        at, client = fault.at + rng.random() * 1.5, rng.randrange(shape.all_clients)
        found.append(Op(at, client, "assoc_add", one, two, rng.choice(EDGE_TYPES), rng.randrange(1, 40)))
    found += _burst(rng, fault.at + 2.0, shape) + _burst(rng, fault.at + 4.0, shape)
    return found + _token_reads(rng, fault.at + 12.0, shape)


def _reservations(rng: random.Random, at: float, one: int, shape: Shape) -> list[Op]:
    """Yield reservations of ids on one shard, from before its owner changes until after that."""
    return [
        Op(
            at + rng.uniform(-0.5, 2.5),
            rng.randrange(shape.all_clients),
            "obj_add_reserved",
            one,
            (one + 1) % KEYS,
            "likes",
            rng.randrange(1, 40),
        )
        for _ in range(5)
    ]


def _token_reads(rng: random.Random, at: float, shape: Shape) -> list[Op]:
    """Yield reads by every client of what was written before the masters changed."""
    reads: list[Op] = []
    for client in range(shape.all_clients):
        when = at + rng.uniform(2.0, 12.0)
        for _ in range(3):
            one, two = rng.sample(range(KEYS), 2)
            kind = rng.choice((*READS, *MANY_READS))
            reads.append(Op(when, client, kind, one, two, rng.choice(EDGE_TYPES), rng.randrange(1, 40), "token"))
    return reads
