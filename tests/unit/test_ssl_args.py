"""The flags of TLS: which belong together, and the errors about a file."""

from __future__ import annotations

import os
import ssl
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from certificates import NEW_KEY, Signer, openssl

from gateway.args import GatewayArgs
from router.args import RouterArgs
from rpc.entrypoint import ServiceArgs
from rpc.tls import SSL_FIELDS, ClientTLS, Renewals, ServerTLS, SslArgs
from worker_service.args import WorkerArgs


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return Signer(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def ours(signer: Signer) -> dict[str, str]:
    made = signer.sign("ours")
    return {"ssl_certfile": str(made.cert), "ssl_keyfile": str(made.key), "ssl_ca_certs": str(made.ca)}


def some(ours: dict[str, str], *names: str) -> dict[str, str]:
    return {f"ssl_{name}": ours[f"ssl_{name}"] for name in names}


def test_without_flags_there_is_no_tls() -> None:
    assert ServiceArgs().server_tls(asks_callers=True) is None
    assert ServiceArgs().client_tls is None


def test_what_is_shown_and_trusted(ours: dict[str, str]) -> None:
    cert, key, ca = (Path(ours[name]).read_bytes() for name in SSL_FIELDS)
    files = tuple(ours[name] for name in SSL_FIELDS)
    worker = WorkerArgs(**ours)
    assert worker.server_tls(asks_callers=True) == ServerTLS(cert=cert, key=key, client_ca=ca, files=files)
    assert worker.client_tls == ClientTLS(ca=ca, cert=cert, key=key)
    router = RouterArgs(model="m", **some(ours, "certfile", "keyfile"))
    assert router.server_tls() == ServerTLS(cert=cert, key=key, files=files[:2])
    assert router.client_tls is None
    gateway = GatewayArgs(**some(ours, "ca_certs"))
    assert gateway.server_tls() is None
    assert gateway.client_tls == ClientTLS(ca=ca)


def test_which_flags_go_together(ours: dict[str, str]) -> None:
    for half in ("certfile", "keyfile"):
        with pytest.raises(ValueError, match="ssl_certfile and ssl_keyfile must be given together"):
            SslArgs(**some(ours, half))
    with pytest.raises(ValueError, match="ssl_ca_certs needs ssl_certfile: workers require"):
        RouterArgs(model="m", **some(ours, "ca_certs"))
    with pytest.raises(ValueError, match="ssl_certfile needs ssl_ca_certs: a worker requires"):
        WorkerArgs(**some(ours, "certfile", "keyfile"))


@pytest.mark.parametrize("name", SSL_FIELDS)
def test_files_that_are_none(ours: dict[str, str], name: str, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.pem", tmp_path):
        with pytest.raises(ValueError, match=f"^{name}: {path} cannot be read: there is no such file"):
            SslArgs(**{**ours, name: str(path)})
    (tmp_path / "text.pem").write_text("no certificate")
    with pytest.raises(ValueError, match=rf"^ssl_.*{name.removeprefix('ssl_')}.* (must be|holds no) "):
        SslArgs(**{**ours, name: str(tmp_path / "text.pem")})


def test_keys_that_would_fail_later(signer: Signer, ours: dict[str, str], tmp_path: Path) -> None:
    """Keys of another certificate, with a passphrase, which cannot be asked for, or of a kind that gRPC does not
    accept."""
    with pytest.raises(ValueError, match=r"must be a certificate and its key.*MISMATCH"):
        SslArgs(**{**ours, "ssl_keyfile": str(signer.sign("another").key)})
    secret = signer.sign("secret", key=(*NEW_KEY[:-1], "-passout", "pass:word"))
    with pytest.raises(ValueError, match=r"ssl_keyfile: .*secret.key has a passphrase"):
        SslArgs(ssl_certfile=str(secret.cert), ssl_keyfile=str(secret.key))
    ed25519 = signer.sign("ed25519", key=("-newkey", "ed25519", "-nodes"))
    with pytest.raises(ValueError, match=r"ed25519.key must be an RSA, P-256 or P-384 key"):
        SslArgs(ssl_certfile=str(ed25519.cert), ssl_keyfile=str(ed25519.key))
    rsa = signer.sign("rsa", key=("-newkey", "rsa:2048", "-nodes"))
    assert SslArgs(ssl_certfile=str(rsa.cert), ssl_keyfile=str(rsa.key)).server_tls() is not None


def test_files_are_read_when_they_change_and_one_that_is_unusable_is_logged_once(
    ours: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if it is written in place, and is as long as the last one."""
    cert, content = tmp_path / "cert.pem", Path(ours["ssl_certfile"]).read_bytes()
    cert.write_bytes(content)
    tls = SslArgs(ssl_certfile=str(cert), ssl_keyfile=ours["ssl_keyfile"]).server_tls()
    assert tls is not None
    renewals = Renewals(tls)
    num_logged = []
    for changed_s, content_now in ((1, content), (2, b"x" * len(content)), (3, content)):
        cert.write_bytes(content_now)
        os.utime(cert, (changed_s, changed_s))
        assert [renewals() for _ in range(3)] == [None] * 3
        num_logged.append(len(caplog.records))
    assert num_logged == [0, 1, 1]


def test_a_connection_during_a_change_of_files_gets_the_last_usable_certificate(
    ours: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are gone again when their content is to be loaded."""
    args = SslArgs(**ours)
    tls, context = args.server_tls(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert tls is not None
    gone = replace(tls, files=("/nowhere", "/nowhere"))
    monkeypatch.setattr("rpc.tls.Renewals", lambda _: lambda: gone)
    tls.follow(context)
    connection: Any = SimpleNamespace(context=None)
    context.sni_callback(connection, None, context)  # type: ignore[operator]
    assert connection.context is context


def test_a_byte_order_mark_is_no_part_of_a_file(ours: dict[str, str], tmp_path: Path) -> None:
    marked = tmp_path / "marked.pem"
    marked.write_bytes(b"\xef\xbb\xbf" + Path(ours["ssl_ca_certs"]).read_bytes())
    assert ClientTLS.of_files(ca=marked) == ClientTLS.of_files(ca=ours["ssl_ca_certs"])


def test_a_heading_that_openssl_alone_takes(ours: dict[str, str], tmp_path: Path) -> None:
    trusted = tmp_path / "trusted.pem"
    openssl("x509", "-in", ours["ssl_certfile"], "-trustout", "-out", trusted)
    with pytest.raises(ValueError, match=r"ssl_certfile: .*trusted.pem must begin with BEGIN CERTIFICATE"):
        SslArgs(**{**ours, "ssl_certfile": str(trusted)})
