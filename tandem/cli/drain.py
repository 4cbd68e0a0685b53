"""`tandem drain`: makes a worker take no new work, finish what it has, and leave.

The command asks the worker itself, over the worker's port, which only processes of the cluster can reach: clients that
may send prompts to a router should not be able to stop its workers.
"""

from __future__ import annotations

import json
import time
from typing import Any

import click
import grpc

from protos import tandem_worker_pb2 as pb
from protos.tandem_worker_pb2_grpc import WorkerStub
from rpc.channel import open_blocking_channel
from rpc.entrypoint import build
from rpc.errors import from_rpc_error
from rpc.tls import ClientTLS, SslArgs
from tandem.answer import message_to_dict
from tandem.cli.errors import readable_errors
from tandem.cli.options import examples, json_option, key_option, router_option
from tandem.client import Client

ANSWER_S = 10.0
"""A worker answers at once, or not at all."""
LOOK_S = 0.2


@click.command(
    short_help="Let a worker finish its requests and exit.",
    epilog=examples("tandem drain decode-1", "tandem drain decode-1 --wait && echo it has left"),
)
@click.argument("worker_id")
@click.option(
    "--wait",
    is_flag=True,
    help="Wait until the worker has exited; print what it still has to finish whenever that changes.",
)
@json_option
@router_option
@key_option
@click.option(
    "--ssl-certfile",
    default="",
    envvar="TANDEM_SSL_CERTFILE",
    show_envvar=True,
    metavar="FILE",
    help="PEM file with a certificate that the workers' CA has signed. Needed if the workers use TLS: they obey only "
    "processes that have one.",
)
@click.option(
    "--ssl-keyfile",
    default="",
    envvar="TANDEM_SSL_KEYFILE",
    show_envvar=True,
    metavar="FILE",
    help="PEM file with the private key of --ssl-certfile, without a passphrase.",
)
@click.option(
    "--ssl-ca-certs", default="", envvar="TANDEM_SSL_CA_CERTS", show_envvar=True, metavar="FILE",
    help="PEM file of the CA that signed the certificates of router and workers. If given, both are called over TLS.",
)  # fmt: skip
def drain(worker_id: str, wait: bool, is_json: bool, address: str, api_key: str, **ssl: Any) -> None:
    """Make the worker WORKER_ID (`tandem status` shows it) take no new requests, finish those it has, and exit, as on
    SIGTERM.

    Requests that it has not finished after its --drain-grace-s continue at another worker. If `tandem up` or Kubernetes
    runs the worker, they start another in its place.
    """
    tls = build(SslArgs, ssl).client_tls
    with readable_errors(address), Client(address, api_key=api_key, tls=tls) as client:
        status = client.status()
        record = _find(status, worker_id)
        _ask_to_drain(record, tls)
        if record.role == pb.ROLE_DECODE and not _has_other_decode_worker(status, worker_id):
            click.echo(
                f"{worker_id}: no other decode worker takes requests. Until one does, new requests are refused; "
                "answers that are not finished after the worker's --drain-grace-s wait for one, and fail after the "
                "router's --worker-wait-s.",
                err=True,
            )
        told = ""
        while (left := _left_to_finish(client.status(), record)) is not None:
            line = f"{worker_id}: draining; {_sentence(left)}"
            if line != told and not is_json:
                click.echo(line)
            if not wait:
                break
            told = line
            time.sleep(LOOK_S)
    if is_json:
        said = {"worker_id": worker_id, "incarnation": record.incarnation, "has_left": left is None}
        click.echo(json.dumps(said | {"load": None if left is None else message_to_dict(left)}, indent=2))
    elif left is None:
        click.echo(f"{worker_id}: has left")


def _find(status: pb.ClusterStatus, worker_id: str) -> pb.WorkerRecord:
    for worker in status.workers:
        if worker.record.worker_id == worker_id:
            return worker.record
    for line in status.unreachable:
        if line.startswith(f"{worker_id} ("):
            raise click.ClickException(f"the router cannot ask {line}. Send its process SIGTERM instead.")
    for line in status.unused:
        if line.startswith(f"{worker_id}: "):
            raise click.ClickException(f"the router does not use {line}. Send its process SIGTERM instead.")
    known = ", ".join(sorted(worker.record.worker_id for worker in status.workers)) or "none"
    raise click.ClickException(f"no worker {worker_id!r}; there are: {known}")


def _has_other_decode_worker(status: pb.ClusterStatus, worker_id: str) -> bool:
    """Whether another decode worker gets new requests."""
    aside = {worker_id, *status.of_another_kind}
    return any(
        worker.record.role == pb.ROLE_DECODE
        and worker.record.worker_id not in aside
        and not worker.record.load.is_draining
        for worker in status.workers
    )


def _ask_to_drain(record: pb.WorkerRecord, tls: ClientTLS | None) -> None:
    try:
        with open_blocking_channel(record.address, tls=tls) as channel:
            WorkerStub(channel).Drain(pb.DrainRequest(), timeout=ANSWER_S)
    except grpc.RpcError as error:
        why = from_rpc_error(error).message
        raise click.ClickException(
            f"{record.worker_id} does not answer at {record.address} ({why}). Ask from where routers run, with a "
            f"certificate of the cluster where it has some (--ssl-certfile), or send its process, {record.pid} there, "
            "SIGTERM."
        ) from error


def _left_to_finish(status: pb.ClusterStatus, asked: pb.WorkerRecord) -> pb.WorkerLoad | None:
    """The worker's load; None: it has left. A worker that does not answer is about to leave: its load is empty."""
    for worker in status.workers:
        if (worker.record.worker_id, worker.record.incarnation) == (asked.worker_id, asked.incarnation):
            return worker.record.load
    is_unreachable = any(line.startswith(f"{asked.worker_id} (") for line in status.unreachable)
    return pb.WorkerLoad() if is_unreachable else None


def _sentence(load: pb.WorkerLoad) -> str:
    parts = [f"{load.num_running} running", f"{load.num_waiting} waiting"]
    if moving := load.blocks.num_grant + load.blocks.num_held:
        parts.append(f"{moving} blocks of KV granted or held")
    return ", ".join(parts)
