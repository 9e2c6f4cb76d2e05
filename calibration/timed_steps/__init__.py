"""From times of whole steps to a `model` profile: time, memory, errors, and what stayed unknown."""
