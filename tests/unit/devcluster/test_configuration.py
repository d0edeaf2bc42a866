"""The settings files that the cluster writes are accepted by its servers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from cryptography import x509

from tao.devcluster.certificates import certificate_ids, issue_certificates, tls_files
from tao.devcluster.configuration import build_topology, crossings, instance_settings, settings_text
from tao.devcluster.layout import LINE, PORT_KINDS, ClusterSettings, Role, Shape
from tao.devcluster.line_control import LineSettings
from tao.devcluster.state_folder import ClusterRecord, StateFolder, TopologyOutline, etcd_location, new_passwords
from tao.etcd.location import EtcdLocation
from tao.follower.settings import FollowerSettings
from tao.leader.settings import LeaderSettings
from tao.runtime.settings import load_settings
from tao.serving.registration import RegistrationSettings
from tao.tailer.settings import TailerSettings

_Settings = LeaderSettings | TailerSettings | FollowerSettings
SHAPE = Shape(regions=2, databases=2, watchers=1)
RECORD = ClusterRecord(
    shape=SHAPE,
    ports={
        **{member.name: dict.fromkeys(PORT_KINDS.get(member.role, ()), 5) for member in SHAPE.members},
        LINE: {crossing.key: 6 for crossing in crossings(SHAPE)},
    },
    passwords=new_passwords(),
    rtt_ms=7.0,
)


@pytest.mark.parametrize(
    ("role", "model"), [(Role.LEADER, LeaderSettings), (Role.TAILER, TailerSettings), (Role.FOLLOWER, FollowerSettings)]
)
def test_the_file_of_each_server_loads_and_names_it(tmp_path: Path, role: Role, model: type[_Settings]) -> None:
    for member in SHAPE.members:
        if member.role is role:
            text = settings_text(member, RECORD, StateFolder(tmp_path), ClusterSettings(), {"default", "hot"})
            (tmp_path / "file.yaml").write_bytes(text)
            settings: _Settings = load_settings(tmp_path / "file.yaml", model)
            assert settings.name == member.name
            if isinstance(settings, TailerSettings):
                assert settings.database_server == SHAPE.database_server(member.region, member.database)
                assert settings.admin == "127.0.0.1:5"


def test_with_etcd_each_region_has_its_own_way_there(tmp_path: Path) -> None:
    shape = msgspec.structs.replace(SHAPE, etcd=True)
    ports = {member.name: dict.fromkeys(PORT_KINDS.get(member.role, ()), 5) for member in shape.members}
    ports[LINE] = {crossing.key: 6 for crossing in crossings(shape)}
    record = msgspec.structs.replace(RECORD, shape=shape, ports=ports)
    for name, port in (("east-leader-1", 5), ("west-leader-1", 6)):
        (member,) = (each for each in shape.members if each.name == name)
        text = settings_text(member, record, StateFolder(tmp_path), ClusterSettings(), {"default"})
        (tmp_path / "file.yaml").write_bytes(text)
        settings = load_settings(tmp_path / "file.yaml", LeaderSettings)
        place = EtcdLocation((f"127.0.0.1:{port}",), "/tao")
        assert settings.topology_file == settings.schema_file == place
    assert etcd_location(record) == EtcdLocation(("127.0.0.1:5",), "/tao")
    assert etcd_location(RECORD) is None


def test_with_tls_every_server_has_a_certificate_with_its_id(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    issue_certificates(folder, certificate_ids(SHAPE))
    authority = (tmp_path / "certificates" / "ca.pem").read_bytes()
    (leader,) = (member for member in SHAPE.members if member.name == "west-leader-2")
    text = settings_text(leader, RECORD, folder, ClusterSettings(tls=True), {"default"})
    (tmp_path / "file.yaml").write_bytes(text)
    files = load_settings(tmp_path / "file.yaml", LeaderSettings).tls
    files.server_context()  # raises when certificate, key and authority do not belong together
    assert files.cluster == "spiffe://localhost/tao/dev"
    assert files.certificate is not None
    certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [
        "spiffe://localhost/tao/dev/west/leader/west-leader-2"
    ]
    issue_certificates(folder, certificate_ids(SHAPE))
    assert (tmp_path / "certificates" / "ca.pem").read_bytes() == authority, "clients may have its file"
    for name in ("operator", "app", "east-watcher-1"):
        tls_files(folder, name).client_context()


def test_the_line_has_a_route_for_every_connection_between_regions(tmp_path: Path) -> None:
    (line,) = (member for member in SHAPE.members if member.role is Role.LINE)
    text = settings_text(line, RECORD, StateFolder(tmp_path), ClusterSettings(), set())
    settings = msgspec.json.decode(text, type=LineSettings)
    assert settings.rtt_ms == 7.0
    assert [(route.source, route.target) for route in settings.routes].count(("east", "west")) == 6


def test_servers_of_a_set_share_their_gtid_domain_and_no_two_servers_an_id(tmp_path: Path) -> None:
    options = {}
    shape = msgspec.structs.replace(SHAPE, standby=True)
    ports = RECORD.ports | {member.name: {"mysql": 5} for member in shape.select(Role.DATABASE)}
    record = msgspec.structs.replace(RECORD, shape=shape, ports=ports)
    for member in shape.members:
        if member.role is Role.DATABASE:
            settings = instance_settings(member, record, StateFolder(tmp_path), ClusterSettings())
            options[member.name] = settings.options
            assert settings.options.read_only, "a server that restarts must not take writes by itself"
    assert len({each.server_id for each in options.values()}) == len(options) == 6
    assert options["east-db-1b"].gtid_domain == options["east-db-1"].gtid_domain
    assert options["east-db-2"].gtid_domain == options["west-db-2"].gtid_domain != options["east-db-1"].gtid_domain


def test_an_added_follower_registers_itself_in_the_first_tier_and_the_topology_leaves_that_to_it(
    tmp_path: Path,
) -> None:
    shape = msgspec.structs.replace(SHAPE, added_followers=2)
    added = [member for member in shape.members if member.name not in SHAPE.server_names]
    assert [(each.name, each.tier, each.registers) for each in added] == [
        ("east-follower-1c", "tier-1", True),
        ("east-follower-1d", "tier-1", True),
    ]
    assert [each.name for each in shape.members if each.registers] == [each.name for each in added]
    ports = RECORD.ports | {each.name: {"grpc": 7, "frames": 8, "admin": 9} for each in added}
    record = msgspec.structs.replace(RECORD, shape=shape, ports=ports, topology_version=1)
    listed = build_topology(record, TopologyOutline())
    assert listed.regions == build_topology(msgspec.structs.replace(record, shape=SHAPE), TopologyOutline()).regions
    (tmp_path / "file.yaml").write_bytes(
        settings_text(added[0], record, StateFolder(tmp_path), ClusterSettings(step_seconds=0.5), {"default"})
    )
    assert load_settings(tmp_path / "file.yaml", FollowerSettings).registration == RegistrationSettings(
        join=True,
        region="east",
        tier="tier-1",
        grpc="127.0.0.1:7",
        frames="127.0.0.1:8",
        admin="127.0.0.1:9",
        step_seconds=0.5,
    )


def test_the_servers_of_a_role_or_name_get_further_settings(tmp_path: Path) -> None:
    one = SHAPE.first_follower()
    settings = ClusterSettings(server_settings={Role.FOLLOWER: {"token": "secret"}, one: {"log_level": "error"}})
    for member in SHAPE.members:
        if member.role in (Role.LEADER, Role.FOLLOWER):
            path = tmp_path / "file.yaml"
            path.write_bytes(settings_text(member, RECORD, StateFolder(tmp_path), settings, {"default"}))
            kind = LeaderSettings if member.role is Role.LEADER else FollowerSettings
            loaded = load_settings(path, kind)
            assert loaded.token == ("secret" if member.role is Role.FOLLOWER else "")
            assert loaded.log_level == ("error" if member.name == one else "info")
