"""Each worker of a local cluster has a GPU of its own, the first one that it sees. CUDA_VISIBLE_DEVICES names some, as
none is here."""

from __future__ import annotations

from pathlib import Path

from clusters import RunningCluster

from tandem.client import Client


def test_each_worker_sees_its_own_first(cluster: RunningCluster) -> None:
    log = cluster.log.read_text()
    assert "prefill-1 on GPU 5, decode-1 on GPU 3\n" in log
    assert "--transport ipc is many times faster\n" in log
    with Client(cluster.address) as client:
        pids = {each.record.worker_id: each.record.pid for each in client.status().workers}
    seen = {
        worker: dict(part.split("=", 1) for part in Path(f"/proc/{pid}/environ").read_text().split("\0") if part)
        for worker, pid in pids.items()
    }
    assert {worker: env["CUDA_VISIBLE_DEVICES"] for worker, env in seen.items()} == {
        "prefill-1": "5,3",
        "decode-1": "3,5",
    }
