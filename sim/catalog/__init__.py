"""Models, GPUs and engine flags by name: everything kvtwin knows before it has measured anything."""
