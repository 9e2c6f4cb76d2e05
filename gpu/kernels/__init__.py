"""Triton kernels of the paged cache and of the forward pass, each with its torch twin beside it.

A kernel's module states its formula and source and the shape of every pointer; `*_twin.py` says the same in torch. The
twins are what the kernels are proved against and what runs on a device without Triton; `gpu.ops` chooses, and records.
"""
