"""The only package that contains SQL: migrations, pools, consistent reads and write transactions.

It implements the store port of tao.model over MySQL or MariaDB, one logical database per shard. Values are bound and
never pasted, every query has a deadline and every queue a bound. What to write is decided in tao.planning.
"""
