"""Readers of measurements made by others, each to plain tables with units in their names."""
