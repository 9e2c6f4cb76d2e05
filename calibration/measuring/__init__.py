"""Designed steps, timed with the executor that serves, and the run folder they are kept in."""
