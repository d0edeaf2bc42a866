"""Maintenance messages on their way: one bounded outbox per destination, in order, acknowledged.

A message may come twice or late, which versions make harmless, but it may not be lost unnoticed: an outbox that can
no longer hold what it owes says so, and the destination invalidates the shards concerned as a whole.
"""
