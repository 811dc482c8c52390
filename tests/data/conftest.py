"""A small checkpoint for the command, and a directory in memory."""

from tests.capture.conftest import quick_path  # noqa: F401
from tests.cli.conftest import tiny  # noqa: F401
