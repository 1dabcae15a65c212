"""Programs to read."""
