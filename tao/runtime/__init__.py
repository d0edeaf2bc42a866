"""The life of a server process: settings, start, signals, readiness, draining, the admin and metrics port.

It is the same for every role. A role supplies what to serve and how to stop.
"""
