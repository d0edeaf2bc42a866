"""Detects failed servers, and decides what to do about them.

The watcher (`server`) probes every server, keeps the ``down`` marks of the topology, renews the masters' leases, and
has a lost master replaced. `probes` observe, `marks` and `mastership` turn observations into actions by pure functions,
and `shard_clones` clones shards that are read too much. `tao.replication` carries out promotions.
"""
