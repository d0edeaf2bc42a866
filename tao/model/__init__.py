"""The concepts of the system as values: ids, objects, associations, versions, changesets, messages, errors, ports.

Everything here is immutable, pure and importable from anywhere, so every other package can use these values without
knowing which code stores, sends or caches them. Ports (Protocols for clock, store, topology store …) lie here too: code
depends on the interface that it needs, and a simulator can provide all of them.

No I/O, no clock, no random numbers. The package imports no other package of this project.
"""
