"""Choose the server that answers for a shard: consistent hashing, explicit mappings, failure detection, hot shards.

Clients and servers run the same pure functions, so both compute the same answer from the same topology document.
Observations (a call failed at this time) are passed in and decisions are returned; `tao.wire.links` does the calling.
"""
