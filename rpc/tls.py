"""TLS: from the flags to the credentials of gRPC and HTTP servers and channels.

    SslArgs (flags, files checked) ── read at the start ──> server_tls: our certificate, and which clients may call
       ^                                                └─> client_tls: whom we trust, and our certificate
       └── read again: at each new connection if a file has changed (Renewals); for each opened channel

Existing connections do not change. Missing or unusable files change nothing. Flags have vLLM's names. gRPC compares the
name or IP address by which a peer is called with those in its certificate.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

_log = logging.getLogger(__name__)
_KEY_KINDS = ("06092a864886f70d010101", "06082a8648ce3d030107", "06052b81040022")
"""Supported key types in a certificate: RSA, P-256, P-384. BoringSSL, which is part of gRPC, accepts a server
certificate with another type and then fails every handshake."""
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, repr=False)
class ClientTLS:
    """PEM. `ca`: whom to trust. `cert` and `key`: our certificate, if the server asks for one."""

    ca: bytes
    cert: bytes | None = None
    key: bytes | None = None
    files: tuple[str, ...] = field(default=(), compare=False)
    """The files that they come from."""

    @classmethod
    def of_files(cls, *, ca: str | Path, cert: str | Path | None = None, key: str | Path | None = None) -> ClientTLS:
        """Read the files. Raises `ValueError` if one cannot be read, or has the wrong content."""
        args = SslArgs(ssl_ca_certs=str(ca), ssl_certfile=str(cert or ""), ssl_keyfile=str(key or ""))
        assert args.client_tls is not None
        return args.client_tls

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials from the files' current content, if that can be used."""
        newest = self._newest()
        return grpc.ssl_channel_credentials(newest.ca, newest.key, newest.cert)

    def _newest(self) -> ClientTLS:
        try:
            return (_args_of(self.files).client_tls if self.files else None) or self
        except ValueError:
            return self


@dataclass(frozen=True, kw_only=True, repr=False)
class ServerTLS:
    """PEM of the server. With `client_ca`, clients must present a certificate that it signed."""

    cert: bytes
    key: bytes
    client_ca: bytes | None = None
    files: tuple[str, ...]
    """The files of `cert`, `key` and, if there is one, `client_ca`."""

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials that follow changes of the files."""
        renewals = Renewals(self)

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            renewed = renewals()
            return None if renewed is None else renewed._configuration()

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), fetch, require_client_authentication=self.client_ca is not None
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], root_certificates=self.client_ca)

    def follow(self, context: ssl.SSLContext) -> None:
        """Make `context`, which has loaded `cert` and `key`, present the files' current content to new connections."""
        renewals, newest = Renewals(self), context

        def on_hello(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            nonlocal newest
            if (renewed := renewals()) is not None:
                newest = renewed._context() or newest
            connection.context = newest

        context.sni_callback = on_hello

    def _context(self) -> ssl.SSLContext | None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(*self.files[:2])
        except OSError:  # changed since they were read: the next connection reads them again
            return None
        return context


class Renewals:
    """Detects changes of a server's files. One per server, since each renewal is returned once."""

    def __init__(self, tls: ServerTLS) -> None:
        self._tls = tls
        self._stamps: list[tuple[int, ...]] | None = None
        """Stamps of the files when they were last read."""

    def __call__(self) -> ServerTLS | None:
        """Return the new content, or None if nothing has changed, or it is unusable, which is logged once."""
        stamps = [_stamp(path) for path in self._tls.files]
        if stamps == self._stamps:
            return None
        self._stamps = stamps
        try:
            read = _args_of(self._tls.files).server_tls(asks_callers=self._tls.client_ca is not None)
        except ValueError as error:
            _log.warning("certificate not renewed", extra={"why": error})
            return None
        if read is None or read == self._tls:
            return None
        _log.info("certificate renewed", extra={"file": read.files[0]})
        self._tls = read
        return read


def _stamp(path: str) -> tuple[int, ...]:
    """Changes when the file changes; empty if there is no file."""
    try:
        stat = Path(path).stat()
    except OSError:
        return ()
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True, kw_only=True)
class SslArgs:
    """TLS flags. Raises `ValueError` naming the field if a file is missing or has the wrong content."""

    ssl_certfile: str = field(
        default="",
        metadata={
            "help": "PEM file with this process' certificate. If given, this process serves over TLS and presents "
            "the certificate to the processes that it calls."
        },
    )
    ssl_keyfile: str = field(
        default="", metadata={"help": "PEM file with the private key of --ssl-certfile, without a passphrase."}
    )
    ssl_ca_certs: str = field(
        default="",
        metadata={
            "help": "PEM file of the CA that signs the certificates of the processes that this one calls. A worker "
            "requires such a certificate of its callers, too."
        },
    )

    def __post_init__(self) -> None:
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ValueError("ssl_certfile and ssl_keyfile must be given together")
        if self.ssl_certfile:
            self._read("ssl_keyfile")
            _check_certificate(self.ssl_certfile, self.ssl_keyfile, self._read("ssl_certfile"))
        if self.ssl_ca_certs:
            _check_ca(self._read("ssl_ca_certs"))

    @property
    def client_tls(self) -> ClientTLS | None:
        """Read the files. None: this process calls others without TLS."""
        if not self.ssl_ca_certs:
            return None
        has_own = bool(self.ssl_certfile)
        return ClientTLS(
            ca=self._read("ssl_ca_certs"),
            cert=self._read("ssl_certfile") if has_own else None,
            key=self._read("ssl_keyfile") if has_own else None,
            files=(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs),
        )

    def server_tls(self, *, asks_callers: bool = False) -> ServerTLS | None:
        """Read the files. None: this process serves without TLS. `asks_callers`: require a client certificate that
        `ssl_ca_certs` signed."""
        if not self.ssl_certfile:
            return None
        return ServerTLS(
            cert=self._read("ssl_certfile"),
            key=self._read("ssl_keyfile"),
            client_ca=self._read("ssl_ca_certs") if asks_callers else None,
            files=(self.ssl_certfile, self.ssl_keyfile, *([self.ssl_ca_certs] if asks_callers else [])),
        )

    def _read(self, name: str) -> bytes:
        path = getattr(self, name)
        try:
            if not Path(path).is_file():
                raise FileNotFoundError(2, "there is no such file")
            return Path(path).read_bytes().removeprefix(_BOM)
        except OSError as error:
            raise ValueError(f"{name}: {path} cannot be read: {error.strerror}") from error


SSL_FIELDS = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")


def _args_of(files: tuple[str, ...]) -> SslArgs:
    """`SslArgs` of certificate, key and optionally the trusted CA; checks the files again. Raises `ValueError`."""
    return SslArgs(**dict(zip(SSL_FIELDS, files, strict=False)))


def hint(details: str) -> str:
    """Advice for a connection that failed with these details from gRPC; "" if TLS is not the reason."""
    if "WRONG_VERSION_NUMBER" in details:
        return "the other side does not use TLS: call it without --ssl-ca-certs, or give it a certificate"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return "its certificate has expired, or was not signed by the CA of --ssl-ca-certs"
    if "Hostname Verification" in details:
        return "its certificate (subjectAltName) does not contain the address that it was called by"
    if "Handshake read failed" in details:
        return "it may require a certificate that it trusts (--ssl-certfile), or have a key that gRPC does not accept"
    return ""


def _check_certificate(cert_path: str, key_path: str, cert: bytes) -> None:
    def refuse() -> str:
        raise ValueError(f"ssl_keyfile: {key_path} has a passphrase; give a key without one")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_path, key_path, password=refuse)
    except ssl.SSLError as error:
        why = f"ssl_certfile {cert_path} and ssl_keyfile {key_path} must be a certificate and its key, both in PEM"
        raise ValueError(f"{why} ({error.reason or error})") from error
    begin, end = cert.find(b"-----BEGIN CERTIFICATE-----"), cert.find(b"-----END CERTIFICATE-----")
    if not 0 <= begin < end:  # OpenSSL also accepts other headings
        raise ValueError(f"ssl_certfile: {cert_path} must begin with BEGIN CERTIFICATE: gRPC accepts no other heading")
    der = ssl.PEM_cert_to_DER_cert(cert[begin : end + 25].decode("ascii")).hex()
    if not any(kind in der for kind in _KEY_KINDS):
        raise ValueError(f"ssl_keyfile: {key_path} must be an RSA, P-256 or P-384 key: gRPC accepts no other")


def _check_ca(ca: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ca.decode("ascii", "ignore"))
    except ssl.SSLError as error:
        raise ValueError(f"ssl_ca_certs holds no PEM certificate ({error.reason or error})") from error
