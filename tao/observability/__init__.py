"""What an operator sees of a running server: metrics, structured logs and the bounded history of keys.

Counters on the hit path are plain attributes, collected when they are scraped, because a labelled increment costs more
than the hit itself. Every server has its own registry; no label ever carries a key.
"""
