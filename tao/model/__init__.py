"""The words of the system as values: ids, objects, associations, versions, changesets, messages, errors, ports.

Everything here is immutable, pure and importable from anywhere, so every other package can speak in these terms
without knowing who stores, sends or caches them. Ports (Protocols for clock, store, peer, topology ...) live here
too: code above depends on what it needs, not on who provides it, and a simulator can provide all of it.
No I/O, no clock, no random numbers. Imports nothing else of this project.
"""
