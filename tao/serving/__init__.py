"""The parts that followers and leaders share: answer a batch of reads from the cache, and fetch what it misses.

A cache server of either role is a cache in front of a source: the leader tier for a follower, the region's database for
a leader. This package holds everything between the two and knows neither role. `FetchSource` is the interface that a
role implements.
"""
