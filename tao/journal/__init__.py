"""The journal of a follower: writes that are accepted on its disk, and made later.

`Acceptor` takes writes that commute (`commuting_write`), stamps them by their leaders' clocks (`LeaderClocks`), and has
`JournalStore` sync them to disk, after another follower has synced their `Copies` if the settings say so. `HeldCopies`
are those that this follower keeps for others. `Applier` makes the writes by the follower's ordinary write path, in the
order that `Schedule` decides. `JournalControl` is what operators see and change.
"""
