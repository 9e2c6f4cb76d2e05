"""The questions asked of the twin, and the command that asks them."""
