"""Programs that a person runs."""
