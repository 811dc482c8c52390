"""A self-signed certificate for servers that tests start."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(folder: Path, address: str) -> tuple[Path, Path]:
    """Paths of a certificate for an IP address and of its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    request = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    names = ["-addext", f"subjectAltName=IP:{address}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*request, *names], check=True, capture_output=True)
    return cert, key
