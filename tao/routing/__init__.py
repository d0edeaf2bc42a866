"""Which server answers for a shard: the consistent-hash ring, explicit mappings, failure detection, hot shards.

The same pure functions run in clients and servers, so that both sides come to the same answer from the same topology
document. Observations (a call failed, at this time) are passed in and decisions come back; calling is for tao.peers.
"""
