"""What the whole suite shares: one private database server, and the name of the server it ran on."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

from tao.devcluster.database import DatabaseInstance, InstanceSettings, default_cache_folder
from tao.devcluster.database_program import Durability, ServerOptions, find_server_binary
from tao.model.errors import OperatorError
from tao.replication.accounts import Account, ServiceAccounts
from tests.rigs.effort import examples

# What a shell starts in the background ignores SIGINT, and so does everything that it starts; tests send SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The time of an example depends on the machine. No test asserts a time, so Hypothesis must not do it either.
hypothesis.settings.register_profile(
    "tao", deadline=None, max_examples=examples(100), suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tao")


def pytest_collection_finish() -> None:
    # Modules and tests live as long as the run: no collection of garbage looks at them again.
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    try:
        binary = find_server_binary(os.environ)
    except OperatorError as error:
        return f"database: {error}"
    return f"database: {binary.flavour} {binary.version_text} ({binary.path})"


@pytest.fixture(scope="session")
def database_accounts() -> ServiceAccounts:
    """Fixed names and passwords for private servers of tests."""
    return ServiceAccounts(
        administrator=Account("tao_admin", "admin-secret"),
        leader=Account("tao_leader", "leader-secret"),
        reader=Account("tao_reader", "reader-secret"),
        replicator=Account("tao_replicator", "replicator-secret"),
        watcher=Account("tao_watcher", "watcher-secret"),
    )


@pytest.fixture(scope="session")
def database_server(
    tmp_path_factory: pytest.TempPathFactory, database_accounts: ServiceAccounts
) -> Iterator[DatabaseInstance]:
    """A running server for the whole session, shared: make schemas of your own name under ``tao_``, and drop them.

    Says where by ``.host``, ``.port`` and ``.socket_path`` (root, without a password), and who by ``.accounts``.
    Durability is relaxed: it syncs nothing at commit.
    """
    settings = InstanceSettings(
        folder=tmp_path_factory.mktemp("database"),
        accounts=database_accounts,
        cache_folder=default_cache_folder(os.environ),
        options=ServerOptions(durability=Durability.RELAXED),
    )
    with asyncio.Runner() as runner:
        instance = DatabaseInstance(find_server_binary(os.environ), settings)
        runner.run(instance.start())
        yield instance
        runner.run(instance.stop())
