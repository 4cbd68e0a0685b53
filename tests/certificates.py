"""Certificates for tests, made on the spot."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rpc.tls import ClientTLS


def own_certificate(folder: Path) -> ClientTLS:
    """One that signed itself, for this machine. Skips the test where nothing can make one."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    folder.mkdir(exist_ok=True)
    cert, key = folder / "cert.pem", folder / "key.pem"
    arguments = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([openssl, *arguments, "-keyout", key, "-out", cert, *names], check=True, capture_output=True)
    return ClientTLS(ca=cert, cert=cert, key=key)
