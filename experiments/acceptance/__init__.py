"""The stages of a GPU acceptance run: what each asks of the device, and the process that carries it out within its time."""
