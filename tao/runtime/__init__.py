"""The life of a server process: settings, start, signals, readiness, draining, the admin and metrics port.

The same for every role, and knows none of them: a role hands over what to serve and how to stop.
"""
