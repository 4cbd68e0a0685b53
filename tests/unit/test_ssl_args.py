"""The flags of TLS: which go together, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from certificates import own_certificate

from gateway.args import GatewayArgs
from router.args import RouterArgs
from rpc.entrypoint import ServiceArgs
from rpc.tls import ClientTLS, ServerTLS, SslArgs
from worker_service.args import WorkerArgs


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = own_certificate(tmp_path_factory.mktemp("certificates"))
    return {"ssl_certfile": str(made.cert), "ssl_keyfile": str(made.key), "ssl_ca_certs": str(made.ca)}


def some(ours: dict[str, str], *names: str) -> dict[str, str]:
    return {f"ssl_{name}": ours[f"ssl_{name}"] for name in names}


def test_without_flags_there_is_no_tls() -> None:
    assert ServiceArgs().server_tls(asks_callers=True) is None
    assert ServiceArgs().client_tls is None


def test_what_is_shown_and_trusted(ours: dict[str, str]) -> None:
    cert, key, ca = (Path(ours[name]) for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"))
    worker = WorkerArgs(**ours)
    assert worker.server_tls(asks_callers=True) == ServerTLS(cert=cert, key=key, client_ca=ca)
    assert worker.client_tls == ClientTLS(ca=ca, cert=cert, key=key)
    router = RouterArgs(model="m", **some(ours, "certfile", "keyfile"))
    assert router.server_tls() == ServerTLS(cert=cert, key=key)
    assert router.client_tls is None
    gateway = GatewayArgs(**some(ours, "ca_certs"))
    assert gateway.server_tls() is None
    assert gateway.client_tls == ClientTLS(ca=ca)


def test_which_flags_go_together(ours: dict[str, str]) -> None:
    for half in ("certfile", "keyfile"):
        with pytest.raises(ValueError, match="ssl_certfile and ssl_keyfile must be given together"):
            SslArgs(**some(ours, half))
    with pytest.raises(ValueError, match="ssl_ca_certs needs ssl_certfile: workers ask"):
        RouterArgs(model="m", **some(ours, "ca_certs"))
    with pytest.raises(ValueError, match="ssl_certfile needs ssl_ca_certs: a worker asks"):
        WorkerArgs(**some(ours, "certfile", "keyfile"))


@pytest.mark.parametrize("name", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs"])
def test_files_that_are_none(ours: dict[str, str], name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name}: .*nowhere.pem cannot be read: No such file"):
        SslArgs(**{**ours, name: str(tmp_path / "nowhere.pem")})
    (tmp_path / "text.pem").write_text("no certificate")
    with pytest.raises(ValueError, match=name):
        SslArgs(**{**ours, name: str(tmp_path / "text.pem")})


def test_a_key_of_another_certificate(ours: dict[str, str], tmp_path: Path) -> None:
    another = own_certificate(tmp_path)
    with pytest.raises(ValueError, match=r"must be a certificate and its key: .*mismatch"):
        SslArgs(**{**ours, "ssl_keyfile": str(another.key)})
