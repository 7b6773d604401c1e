"""Private helpers for reading and writing files safely."""
