"""Caches that have nothing: everybody misses one key at once (`herd`), a tier that restarts (`storm`)."""
