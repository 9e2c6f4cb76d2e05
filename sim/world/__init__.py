"""The world around the core: clients, replicas and routers as SimPy processes."""

from .run import run_world

__all__ = ["run_world"]
