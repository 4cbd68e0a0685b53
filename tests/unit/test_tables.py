"""The tables that `tandem` prints, and the problems that an audit finds. None of it needs a cluster."""

from __future__ import annotations

import pytest

from protos import tandem_inference_pb2 as pb
from protos import tandem_worker_pb2 as worker_pb
from tandem.tables import (
    Table,
    adapter_lines,
    audit_problems,
    audit_table,
    format_table,
    hit_rate_text,
    logprobs_table,
    router_line,
    seen_by_all,
    status_table,
    version_line,
)

ADDRESS = "127.0.0.1:50051"


def ledger(total: int = 100, free: int = 60, cached: int = 20, sequence: int = 10, grant: int = 7, held: int = 3):
    return worker_pb.BlockLedger(
        num_blocks=total, num_free=free, num_cached=cached, num_sequence=sequence, num_grant=grant, num_held=held
    )


def audit_of(**blocks: int) -> worker_pb.WorkerAudit:
    return worker_pb.WorkerAudit(worker_id="decode-1", role=worker_pb.ROLE_DECODE, blocks=ledger(**blocks))


def test_a_table_is_aligned_and_has_no_trailing_spaces() -> None:
    table = Table(headers=("id", ">n", ""), rows=[("a", "1", "draining"), ("long-id", "1000", "")])
    assert format_table(table) == "id          n\na           1  draining\nlong-id  1000"


def test_status_lists_prefill_workers_first_with_their_pools() -> None:
    decode = worker_pb.WorkerStatus(
        record=worker_pb.WorkerRecord(
            worker_id="decode-1",
            role=worker_pb.ROLE_DECODE,
            address="10.0.0.2:1",
            pid=7,
            is_draining=True,
            load=worker_pb.WorkerLoad(num_running=3, num_waiting=2, blocks=ledger()),
        ),
        num_prefix_queries_tokens=200,
        num_prefix_hits_tokens=50,
    )
    prefill = worker_pb.WorkerStatus(record=worker_pb.WorkerRecord(worker_id="z", role=worker_pb.ROLE_PREFILL))
    apart = [worker_pb.WorkerPair(prefill_worker="a", decode_worker="z")]
    rows = status_table(worker_pb.ClusterStatus(workers=[decode, prefill], ejected=["z"], apart=apart)).rows
    assert [row[0] for row in rows] == ["z", "decode-1"]
    assert [row[-1] for row in rows] == ["ejected", "draining"]
    status = worker_pb.ClusterStatus(
        workers=[prefill],
        not_connected=["z"],
        of_another_kind=["z"],
        apart=[worker_pb.WorkerPair(prefill_worker="z", decode_worker="d")],
    )
    assert status_table(status).rows[0][-1] == "not connected, of another kind: no new requests, no transfers to d"
    assert rows[1] == ("decode-1", "decode", "10.0.0.2:1", "7", "3", "2", "60/20/20 of 100", "25 %", "draining")


def test_several_routers_see_each_worker_once_and_every_remark_is_said() -> None:
    def seen(*names: str, **remarks: list[str]) -> worker_pb.ClusterStatus:
        workers = [worker_pb.WorkerStatus(record=worker_pb.WorkerRecord(worker_id=name)) for name in names]
        return worker_pb.ClusterStatus(workers=workers, **remarks)  # type: ignore[arg-type]

    whole = seen_by_all([seen("a", ejected=["a"]), seen("a", "b", ejected=["b", "a"], unused=["c: another model"])])
    assert [row[0] for row in status_table(whole).rows] == ["a", "b"]
    assert [row[-1] for row in status_table(whole).rows] == ["ejected", "ejected"]
    assert list(whole.ejected) == ["a", "b"]
    assert list(whole.unused) == ["c: another model"]


def test_one_version_is_said_once_and_others_name_those_that_have_them() -> None:
    def seen(of_router: str, **of_workers: str) -> worker_pb.ClusterStatus:
        records = [worker_pb.WorkerRecord(worker_id=name, version=version) for name, version in of_workers.items()]
        workers = [worker_pb.WorkerStatus(record=record) for record in records]
        return worker_pb.ClusterStatus(router_id=f"r{of_router}", version=of_router, workers=workers)

    assert version_line([seen("2", a="2", b="2")]) == "tandem 2"
    assert version_line([seen("2", b="2", a="1", c="2", d="")]) == "tandem 2; others: a (1), d (older)"
    assert version_line([seen("1", a="2", b="2"), seen("2", a="2", b="2")]) == "tandem 2; others: router r1 (1)"
    assert version_line([seen("", a="2")]) == "tandem 2; others: router r (older)"
    assert version_line([seen("", a="", b="")]) == "", "older than those that say it"


def test_which_workers_have_which_adapter() -> None:
    def worker(name: str, **digests: str) -> worker_pb.WorkerStatus:
        record = worker_pb.WorkerRecord(worker_id=name, lora_digests=digests)
        record.model.lora_names.extend(digests)
        return worker_pb.WorkerStatus(record=record)

    workers = [worker("b", sql="1", poet="2"), worker("a", sql="1", other="3"), worker("c", sql="1", other="4")]
    assert adapter_lines(worker_pb.ClusterStatus(workers=workers)) == [
        "adapter other: a; another of its name: c",
        "adapter poet: b",
        "adapter sql: every worker",
    ]
    assert adapter_lines(worker_pb.ClusterStatus()) == []


def test_status_tells_of_the_hosts_memory_where_some_is_used() -> None:
    load = worker_pb.WorkerLoad(host_blocks=worker_pb.HostLedger(num_blocks=50, num_free=30, num_kept=20))
    workers = [worker_pb.WorkerStatus(record=worker_pb.WorkerRecord(worker_id=name)) for name in ("a", "b")]
    assert ">kept on the host" not in status_table(worker_pb.ClusterStatus(workers=workers)).headers
    workers[1].record.load.CopyFrom(load)
    table = status_table(worker_pb.ClusterStatus(workers=workers))
    assert [row[table.headers.index(">kept on the host")] for row in table.rows] == ["-", "20 of 50"]


def test_how_likely_tokens_were() -> None:
    def logprob(token: bytes, value: float, rank: int) -> pb.Logprob:
        return pb.Logprob(token=token, logprob=value, rank=rank)

    paris, the = logprob(b" Paris", -0.105, 1), logprob(b" the", -3.0, 2)
    half = pb.TokenLogprobs(sampled=logprob("\u00e9".encode()[:1], float("-inf"), 30_000), top=[the, paris])
    table = logprobs_table([pb.TokenLogprobs(sampled=paris, top=[paris]), half])
    assert format_table(table) == (
        "token     probability   rank  likeliest\n"
        "' Paris'       90.0 %      1  ' Paris' 90.0 %\n"
        "b'\\xc3'       < 0.1 %  30000  ' the' 5.0 %     ' Paris' 90.0 %"
    )
    assert (
        format_table(logprobs_table([pb.TokenLogprobs(sampled=paris)])).splitlines()[1] == "' Paris'       90.0 %     1"
    )


def test_a_hit_rate_needs_a_prompt() -> None:
    assert hit_rate_text(0, 0) == "-"
    assert hit_rate_text(0, 10) == "0 %"


def test_the_router_line_says_when_redis_is_gone() -> None:
    status = worker_pb.ClusterStatus(
        router_id="r1", num_running_requests=1, num_queued_requests=2, num_queued_tokens=512, is_registry_reachable=True
    )
    assert router_line(status, ADDRESS) == f"router r1 at {ADDRESS}: 1 running, 2 queued (512 tokens)"
    status.is_registry_reachable = False
    assert "Redis is not reachable" in router_line(status, ADDRESS)


def test_an_audit_that_balances_has_no_problems() -> None:
    audit = worker_pb.ClusterAudit(workers=[audit_of()])
    assert audit_problems(audit) == []
    assert audit_table(audit).rows == [("decode-1", "decode", "60", "20", "10", "7", "3", "100", "100", "ok")]


@pytest.mark.parametrize(
    ("audit", "problem"),
    [
        (worker_pb.ClusterAudit(workers=[audit_of(free=59)]), "99 blocks have an owner, the pool has 100"),
        (worker_pb.ClusterAudit(workers=[audit_of(held=4)]), "101 blocks have an owner, the pool has 100"),
        (
            worker_pb.ClusterAudit(workers=[worker_pb.WorkerAudit(worker_id="w", problems=["block 7 is free twice"])]),
            "w: block 7 is free twice",
        ),
        (
            worker_pb.ClusterAudit(workers=[audit_of()], router_id="r", problems=["room on w is nobody's"]),
            "r: room on w is nobody's",
        ),
        (worker_pb.ClusterAudit(workers=[audit_of()], unreachable=["w2: UNAVAILABLE"]), "unreachable: w2: UNAVAILABLE"),
        (worker_pb.ClusterAudit(), "the router knows no worker"),
    ],
)
def test_an_audit_names_what_is_wrong(audit: worker_pb.ClusterAudit, problem: str) -> None:
    (found,) = audit_problems(audit)
    assert problem in found
    assert all(row[-1] == "WRONG" for row in audit_table(audit).rows if "blocks" in problem or "twice" in problem)
