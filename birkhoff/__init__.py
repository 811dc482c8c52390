"""Birkhoff: run, read and steer DeepSeek-V4."""

from birkhoff.api import Engine, load
from birkhoff.errors import BirkhoffError
from birkhoff.output import Output, Trace

__all__ = ["BirkhoffError", "Engine", "Output", "Trace", "load"]
