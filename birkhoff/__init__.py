"""Birkhoff: run, read and steer DeepSeek-V4."""
