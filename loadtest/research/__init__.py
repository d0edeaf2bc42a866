"""Research without servers: eviction policies played against the published skew, and what a hit rate depends on.

`python -m loadtest.research.eviction --plot docs/explanation/eviction.png` draws what the choice in
`tao.cache.eviction` rests on; `python -m loadtest.research.replay` plays the requests of `run` against the cache
itself.
"""
