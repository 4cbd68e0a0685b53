"""Wrong messages on every RPC between processes: each gets an error that says what is wrong, and everything goes on.

All files of this folder share one real cluster; tests send messages directly to its workers. After each test the same
processes run, every block is free or cached, and no log holds a traceback. After all tests a request gets the same
answer as before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import grpc
import pytest
from clusters import RunningCluster, run_cluster, wait_until

from protos import tandem_kv_transfer_pb2 as kv_pb
from tandem.client import Client
from tandem.tables import not_at_rest
from wrong_messages.saying import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    PROMPT,
    TIMEOUT_S,
    Peers,
    Session,
    ask,
    engine_request,
)

_fresh_ids = itertools.count(45_000)


@pytest.fixture(scope="package")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    sizes = ("--max-model-len", str(MAX_MODEL_LEN), "--num-kv-blocks", str(NUM_BLOCKS))
    log = tmp_path_factory.mktemp("cluster") / "log"
    with run_cluster(log, *sizes, "--block-size", str(BLOCK_SIZE), "--attention-backend", "torch") as cluster:
        yield from _peers_of(cluster)


def _peers_of(cluster: RunningCluster) -> Iterator[Peers]:
    prefill, decode = sorted((w.record for w in cluster.workers()), key=lambda record: int(record.role))
    unbounded = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with Client(cluster.address) as client, grpc.insecure_channel(cluster.address, options=unbounded) as router:
        peers = Peers(cluster, prefill, decode, client, router)
        answer = ask(client)
        for record in (prefill, decode):
            peers.channels[record.worker_id] = grpc.insecure_channel(record.address, options=unbounded)
        yield peers
        assert ask(client) == answer
        cluster.wait_until_at_rest()
        for channel in peers.channels.values():
            channel.close()


@pytest.fixture(autouse=True)
def all_is_as_before(peers: Peers) -> Iterator[None]:
    yield
    assert {worker.record.pid for worker in peers.client.status().workers} == {peers.prefill.pid, peers.decode.pid}
    wait_until(lambda: is_at_rest(peers), TIMEOUT_S, "every block free or cached", peers.client.audit)
    log = peers.cluster.log.read_text()
    assert not {word for word in ("Traceback", "bug_id") if word in log}, log[-5000:]


def is_at_rest(peers: Peers) -> bool:
    return not not_at_rest(peers.client.audit())


@pytest.fixture
def granted(peers: Peers) -> Iterator[tuple[Session, kv_pb.Grant]]:
    """A session in which the decode worker has made a grant for a prompt of 40 tokens, none of which it has cached."""
    with Session(peers, "Decode") as session:
        session.hello().say(reserve=engine_request(prompt_token_ids=[next(_fresh_ids), *PROMPT[1:]]))
        yield session, session.event().granted
