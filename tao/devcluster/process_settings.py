"""The settings of a cluster's processes: what their files hold, and how its database servers run.

Values from a record, so that what is started can be read and tested without starting it.
"""

from __future__ import annotations

import os

import msgspec
import yaml

from tao.devcluster.cluster_topology import line_routes
from tao.devcluster.database import InstanceSettings
from tao.devcluster.layout import ClusterSettings, Member, Role
from tao.devcluster.line_control import LineSettings
from tao.devcluster.ports import LOOPBACK
from tao.devcluster.processes import Lifetime
from tao.devcluster.server_options import ServerOptions
from tao.devcluster.state_folder import ClusterRecord, StateFolder, service_accounts
from tao.devcluster.template import default_cache_folder
from tao.schema.types import DEFAULT_ARENA

_SERVER_IDS_PER_REGION = 1_000


def lifetime_of(settings: ClusterSettings) -> Lifetime:
    """How long the cluster's processes may live."""
    return Lifetime.DETACHED if settings.detached else Lifetime.WITH_PARENT


def instance_settings(
    member: Member, record: ClusterRecord, folder: StateFolder, settings: ClusterSettings, *, port: int
) -> InstanceSettings:
    """How a database server of the cluster runs, on ``port`` (0: any)."""
    shape = record.shape
    number = shape.database_names.index(member.database) + 1
    return InstanceSettings(
        folder=folder.database(member.name),
        accounts=service_accounts(record.passwords),
        cache_folder=default_cache_folder(os.environ),
        port=port,
        options=ServerOptions(
            server_id=number + _SERVER_IDS_PER_REGION * shape.region_names.index(member.region),
            gtid_domain=number,
            replicated=shape.is_distributed,
            semi_sync=settings.semi_sync,
            # Of several servers none is master by itself: whoever starts them opens the one that the topology names.
            read_only=shape.is_distributed,
            durability=settings.durability,
            buffer_pool_mb=settings.buffer_pool_mb,
        ),
        lifetime=lifetime_of(settings),
        start_seconds=settings.start_seconds,
    )


def settings_text(
    member: Member, record: ClusterRecord, folder: StateFolder, settings: ClusterSettings, arenas: set[str]
) -> bytes:
    """What the file of a leader, follower or tailer holds (YAML), or that of the delay line (JSON).

    ``arenas``: those that the schema names.
    """
    if member.role is Role.LINE:
        return line_settings_text(record, folder)
    accounts = service_accounts(record.passwords)
    if member.role is Role.WATCHER:
        watcher = {
            "name": member.name,
            "region": member.region,
            "topology_file": str(folder.topology),
            "administrator_password": accounts.administrator.password,
            "replicator_password": accounts.replicator.password,
            "admin": f"{LOOPBACK}:{record.watcher_ports[member.name]}",
            "peers": {
                other.region: f"{LOOPBACK}:{record.watcher_ports[other.name]}"
                for other in record.shape.members
                if other.role is Role.WATCHER and other.region != member.region
            },
            "log_level": settings.log_level,
        }
        return yaml.safe_dump(watcher, sort_keys=False).encode()
    found: dict[str, object] = {
        "name": member.name,
        "topology_file": str(folder.topology),
        "schema_file": str(folder.schema),
        "log_level": settings.log_level,
    }
    if member.role is Role.TAILER:
        found |= {
            "region": member.region,
            "database_server": record.shape.database_server(member.region, member.database),
            "state_folder": str(folder.path / "servers" / member.name),
            "user": accounts.replicator.user,
            "password": accounts.replicator.password,
            "admin": f"{LOOPBACK}:{record.tailer_ports[member.name]}",
        }
    else:
        found |= {
            "cache_mb": settings.cache_mb,
            "arena_mb": dict.fromkeys(sorted(arenas - {DEFAULT_ARENA}), settings.arena_mb),
        }
    if member.role is Role.LEADER:
        found |= {
            "leader_user": accounts.leader.user,
            "leader_password": accounts.leader.password,
            "spool": {"folder": str(folder.path / "servers" / member.name)},
        }
    if member.role in (Role.LEADER, Role.FOLLOWER):
        found |= {"reader_user": accounts.reader.user, "reader_password": accounts.reader.password}
    return yaml.safe_dump(found, sort_keys=False).encode()


def line_settings_text(record: ClusterRecord, folder: StateFolder) -> bytes:
    """The delay line's file; its routes are those of the record's ports."""
    routes = line_routes(record.shape, record.addresses)
    settings = LineSettings(control=str(folder.line_control), routes=routes, rtt_ms=record.rtt_ms)
    return msgspec.json.format(msgspec.json.encode(settings))
