"""The present tree beside an earlier commit: which figures have become slower."""
