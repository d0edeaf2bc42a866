"""Checks of the whole: caches against databases (`tao verify`), edges against their inverses (`tao repair`).

Both only read, by the read-only account and the servers' own inspection; what has to be mended is asked of the leaders
that own it, who do it under the same rules as any write.
"""
