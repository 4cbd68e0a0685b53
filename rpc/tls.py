"""TLS, from the flags to what gRPC and HTTP servers and channels are given. Owns nothing; files are read at the start.

    SslArgs (flags, checked) ──> server_tls: what callers are shown, and whether they must show something themselves
                             └─> client_tls: whom we trust, and what we show

vLLM's words for the flags. gRPC compares the name or IP address under which a peer is called with those in its
certificate.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc


@dataclass(frozen=True, kw_only=True)
class ClientTLS:
    """PEM files. `ca`: whom to trust. `cert` and `key`: who we are, where the server asks."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("a client certificate needs both cert and key")

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises `OSError` naming the file that cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=self.ca.read_bytes(),
            private_key=self.key.read_bytes() if self.key else None,
            certificate_chain=self.cert.read_bytes() if self.cert else None,
        )


@dataclass(frozen=True, kw_only=True)
class ServerTLS:
    """PEM files of the server; with `client_ca`, clients must show a certificate that it signed."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Raises `OSError` naming the file that cannot be read."""
        return grpc.ssl_server_credentials(
            [(self.key.read_bytes(), self.cert.read_bytes())],
            root_certificates=self.client_ca.read_bytes() if self.client_ca else None,
            require_client_auth=self.client_ca is not None,
        )


@dataclass(frozen=True, kw_only=True)
class SslArgs:
    """Flags. Raises `ValueError` naming the field, where a file is missing or is not what it should be."""

    ssl_certfile: str = field(
        default="",
        metadata={"help": "PEM file with this process' certificate: it is served over TLS, and peers are shown it."},
    )
    ssl_keyfile: str = field(default="", metadata={"help": "PEM file with the key of ssl_certfile."})
    ssl_ca_certs: str = field(
        default="", metadata={"help": "PEM file of who signs the certificates of the servers that this process calls."}
    )

    def __post_init__(self) -> None:
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ValueError("ssl_certfile and ssl_keyfile must be given together")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self.ssl_certfile:
            _check_file("ssl_certfile", self.ssl_certfile)
            _check_file("ssl_keyfile", self.ssl_keyfile)
            try:
                context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
            except ssl.SSLError as error:
                raise ValueError(f"ssl_certfile and ssl_keyfile must be a certificate and its key: {error}") from error
        if self.ssl_ca_certs:
            _check_file("ssl_ca_certs", self.ssl_ca_certs)
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except ssl.SSLError as error:
                raise ValueError(f"ssl_ca_certs: {self.ssl_ca_certs} holds no certificate: {error}") from error

    @property
    def client_tls(self) -> ClientTLS | None:
        """None: others are called without TLS."""
        if not self.ssl_ca_certs:
            return None
        cert, key = (Path(name) if name else None for name in (self.ssl_certfile, self.ssl_keyfile))
        return ClientTLS(ca=Path(self.ssl_ca_certs), cert=cert, key=key)

    def server_tls(self, *, asks_callers: bool = False) -> ServerTLS | None:
        """None: this process is served without TLS. `asks_callers`: for a certificate that `ssl_ca_certs` signed."""
        if not self.ssl_certfile:
            return None
        client_ca = Path(self.ssl_ca_certs) if asks_callers else None
        return ServerTLS(cert=Path(self.ssl_certfile), key=Path(self.ssl_keyfile), client_ca=client_ca)


def client_tls(ca_file: str) -> ClientTLS | None:
    """Of a client that shows nothing itself; None for "". Raises `ValueError`."""
    return SslArgs(ssl_ca_certs=ca_file).client_tls


def _check_file(name: str, path: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be read: {error.strerror}") from error
