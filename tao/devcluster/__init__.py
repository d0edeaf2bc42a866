"""A whole cluster on one machine, for development, the demonstration and end-to-end tests.

Database servers, leaders, followers, tailers, watchers and workers are processes of their own; their data, logs and
records lie in one state folder that survives a crash. The servers are used only through their commands and ports, as an
operator uses them; their processes are forked from one that has imported their modules (`fork_server`). `cluster` is
the entry; it is a tool, not part of what runs in production.
"""
