"""What followers and leaders do alike: answer a batch of reads from the cache, and fill what it misses.

A cache server of either role is a cache in front of a source: the leader tier for a follower, the region's database
for a leader. Everything between the two is here and knows neither role: the hits of a batch in one synchronous pass,
single flight, fill tickets, prefixes that grow, minimum versions. `FillSource` is the seam that a role implements.
"""
