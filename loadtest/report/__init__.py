"""One note of what all scenarios measured, from the JSON files that they wrote."""
