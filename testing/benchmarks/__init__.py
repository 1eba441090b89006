"""Programs that measure the library; nothing here is timed in a test."""
