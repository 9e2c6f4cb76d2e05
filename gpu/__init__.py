"""The real twin: a paged KV pool and a forward pass on a device. Nothing in here yet.

This package will hold what carries out the core's plans for real: the memory layout of the pool, the pool itself,
the Triton kernels that read and write it, a model's forward pass, and the executor that times each step. It may
import `sim.core`, `sim.memory` and `sim.catalog`; it never imports SimPy or the simulated world, so that a GPU
machine needs torch and triton and nothing else.
"""
