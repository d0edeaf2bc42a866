"""Research: eviction policies played against the published skew, what a hit rate depends on, what one query costs.

`python -m loadtest.research.eviction --plot docs/explanation/eviction.png` draws what the choice in
`tao.cache.eviction` rests on; `python -m loadtest.research.replay` plays the requests of `run` against the cache
itself. `python -m loadtest.research.lone_query` counts what a query of one awaiter costs its two processes.
"""
