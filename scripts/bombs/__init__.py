"""Requests that cost a server far more than they cost their client.

Each is a name, a path, and a function that makes the body; where it can be of any size, its argument is the size of the
largest body that the server takes.
"""

from . import grammars, bodies  # noqa: F401  (they fill the list)
from .making import BOMBS, MESSAGES, Bomb

__all__ = ["BOMBS", "MESSAGES", "Bomb"]
