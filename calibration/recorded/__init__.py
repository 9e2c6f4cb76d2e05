"""Recorded runs of servers: reading them, simulating their requests again, and what they say of host times."""
