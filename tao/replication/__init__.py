"""Replication sets of database servers: promotion, reseeding, leases, semi-sync, GTID sets and accounts.

`promotion_plan` decides, from what the servers of a replication set report, whether one of them may be promoted and
which. `promotion` carries it out, for the operator's command or for the watcher, in steps each of which may be the last
one: the next run finishes or undoes what an interrupted run began, because the state is read from the servers and from
the topology and nowhere else. `replica_seed` rebuilds a server from its master. `locks` keep two of these changes from
running at once.

`server_statements`, `lease` and `accounts` hold the SQL for one server, `gtid` compares what servers have,
`database_copy` runs the database's own dump and load programs.
"""
