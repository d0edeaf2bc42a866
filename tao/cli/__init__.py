"""The operator's commands: `tao ...`. Each parses, calls one thing below, and prints a table or JSON.

A command that changes something shows what it will do and asks, unless told `--yes`. Commands import what they need
when they run, so that `tao --help` is quick and the SDK's installation can show what is missing.
"""
