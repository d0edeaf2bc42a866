"""The choice between two implementations of the events that a server remembers: the compiled one, or Python where
there was no compiler. `tao.observability.key_events_python` says what it is."""

from __future__ import annotations

try:
    from tao.observability.key_events_core import KeyEvents
except ImportError:  # built without a compiler
    from tao.observability.key_events_python import KeyEvents  # type: ignore[assignment]

__all__ = ["KeyEvents"]
