"""Maintenance messages on their way: numbered, acknowledged, kept for those who come back.

A message may come twice or late, which versions make harmless, but it may not be lost unnoticed. `Publisher` keeps what
was published in a bounded memory log, with a spool on disk behind it; `Coverage` says which part of the binlog
that is; a `Subscription` is one subscriber's cursors into it; `Inbox` is the subscriber's side. Where nothing can
continue, the subscriber is told so and drops the shard as a whole.
"""
