"""The SDK: an asynchronous client, its synchronous twin, and schema-typed values.

Installs alone: it reaches neither the database nor metrics nor the servers' other extras. Queries issued in one tick
of the event loop to one server travel as one batch; wrong use fails before the network, with the field's name.
"""
