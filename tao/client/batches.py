"""The work for each item of a many-form, compiled where there is a compiler (`hatch_build.py`)."""

try:
    from tao.client.batches_core import are_ids, by_server, deliver, objects_of
except ImportError:  # built without a compiler
    from tao.client.batches_python import are_ids, by_server, deliver, objects_of

__all__ = ["are_ids", "by_server", "deliver", "objects_of"]
