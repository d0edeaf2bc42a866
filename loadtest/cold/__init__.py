"""Cold caches: all clients miss one key at once (`herd`), and a tier restarts with empty caches (`storm`)."""
