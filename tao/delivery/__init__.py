"""Maintenance messages from leaders to subscribers: numbered, acknowledged, and kept for subscribers that come back.

A message may arrive twice or late, which versions make harmless, but it may not be lost unnoticed. `Publisher` keeps
published messages in a bounded memory log backed by a spool on disk. `Coverage` records which binlog positions these
messages cover. A `Subscription` is one subscriber's cursors into the log, and `Inbox` is the subscriber's side. A
subscriber that cannot be continued receives a reset and drops the shard as a whole.
"""
