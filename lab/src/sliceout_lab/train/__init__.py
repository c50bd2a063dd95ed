"""Training: one loop for all families, in eager, compiled or captured steps, with exact resume."""

from .loop import Settings, run
from .stop import Stopped

__all__ = ["Settings", "Stopped", "run"]
