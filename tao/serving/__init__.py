"""The parts that followers and leaders share: answer a batch of reads from the cache, and fetch what it misses.

A cache server of either role is a cache in front of a source: the leader tier for a follower, the region's database for
a leader. This package holds everything between the two.

Read from the top: `server` (the parts of a process) → `requests` (a request on its way in) → `read_service` (hits) →
`misses` → `single_flight` → `sources` (databases and other servers); writes take `forward_path`. `configuration` is
what all of them share.
"""
