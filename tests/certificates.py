"""Certificates for tests, made on the spot."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from rpc.tls import ClientTLS, SslArgs


@dataclass(frozen=True)
class Certificate:
    """PEM files. `ca`: the signer's certificate."""

    ca: Path
    cert: Path
    key: Path

    @property
    def flags(self) -> list[str]:
        return ["--ssl-certfile", str(self.cert), "--ssl-keyfile", str(self.key), "--ssl-ca-certs", str(self.ca)]

    @property
    def args(self) -> SslArgs:
        return SslArgs(ssl_certfile=str(self.cert), ssl_keyfile=str(self.key), ssl_ca_certs=str(self.ca))

    @property
    def client(self) -> ClientTLS:
        """A client that trusts the signer and presents this certificate."""
        return ClientTLS.of_files(ca=self.ca, cert=self.cert, key=self.key)

    @property
    def trusting(self) -> ClientTLS:
        """A client that trusts the signer and presents no certificate."""
        return ClientTLS.of_files(ca=self.ca)


class Signer:
    """A certificate authority in a folder. Skips the test where openssl is missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(exist_ok=True)
        self.cert, self._key = folder / "ca.pem", folder / "ca.key"
        usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
        openssl(
            "req", "-x509", *NEW_KEY, "-days", "2", "-subj", "/CN=ca", "-keyout", self._key, "-out", self.cert, *usage
        )

    def sign(
        self, name: str, *, address: str = "IP:127.0.0.1", days: int = 2, key: tuple[str, ...] = ()
    ) -> Certificate:
        """`days` below 0: an expired certificate. `key`: openssl arguments for another kind of key than P-256."""
        made = Certificate(self.cert, self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request, names = self._folder / f"{name}.csr", self._folder / f"{name}.txt"
        names.write_text(f"subjectAltName=DNS:localhost,{address}")
        openssl("req", *(key or NEW_KEY), "-subj", f"/CN={name}", "-keyout", made.key, "-out", request)
        signing = ["-CA", self.cert, "-CAkey", self._key, "-CAcreateserial", "-days", str(days), "-extfile", names]
        openssl("x509", "-req", "-in", request, *signing, "-out", made.cert)
        return made


NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def openssl(*arguments: str | Path) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("no openssl to make a certificate with")
    subprocess.run([program, *arguments], check=True, capture_output=True)
