"""Workers of one model, each with its own adapters: which requests go to which workers. No network."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, cast

import grpc
import pytest
from lifecycle_bench import PROMPT, Asked, Bench, ScriptedSession, load, settle

from protos import tandem_worker_pb2 as pb
from router.request_events import WorkerKey
from router.served_kind import Kind
from router.validation.resumption import NOTHING, Resumption, kind_name
from router.worker_handle import WorkerHandle
from rpc.errors import NoWorker


class Several(Bench):
    """A bench with more decode workers, all of one model. Tests name each by its worker id."""

    def __init__(self, *names: str, **bench: Any) -> None:
        super().__init__(**bench)
        self.by_name = {"d": self.decode} | {name: self.add(name, pb.Role.ROLE_DECODE, 2048) for name in names}

    def sent(self, name: str) -> list[pb.DecodeCommand]:
        return cast(ScriptedSession, self.by_name[name].session).sent

    def fill(self, *names: str) -> None:
        for name in names:
            self.by_name[name].set_load(load(0))

    def free(self, name: str) -> None:
        self.by_name[name].set_load(load(100))
        self.dispatch()

    def ask(self, name: str, **asked: Any) -> Asked:
        return Asked(self.lifecycle(name, **({"prompt_token_ids": [5, 6]} | asked)).run())


def requests_at(bench: Several, name: str) -> list[str]:
    return [command.generate.request_id for command in bench.sent(name) if command.HasField("generate")]


async def leave(*asked: Asked) -> None:
    for each in asked:
        await each.leave()


async def test_who_asks_for_none_is_answered_by_any() -> None:
    bench = Several("other")
    bench.tell_adapters(bench.decode, sql="1")
    asked = [bench.ask("a"), bench.ask("b")]
    await settle()
    assert (requests_at(bench, "d"), requests_at(bench, "other")) == (["a"], ["b"])
    await leave(*asked)
    assert bench.pool.of_another_kind == []


async def test_workers_without_an_adapter_get_none_of_its_requests() -> None:
    bench = Bench(with_prefill=True)
    looked_up: list[str] = []

    async def longest_match(token_ids: list[int], cache_salt: str, lora_digest: str = "") -> dict[WorkerKey, int]:
        looked_up.append(lora_digest)
        return {}

    bench.cluster.prefixes.longest_match = longest_match  # type: ignore[method-assign]
    bench.tell_adapters(bench.prefill, sql="1")
    bench.tell_adapters(bench.decode, poet="2")
    with pytest.raises(NoWorker, match="no decode worker with the adapter 'sql' is available"):
        await Asked(bench.lifecycle("a", lora_name="sql").run()).task
    asked = Asked(bench.lifecycle("b", lora_name="poet").run())
    await settle()
    [command] = bench.d.sent
    assert (command.generate.lora_name, command.generate.lora_digest) == ("poet", "2"), "the prefill worker has another"
    await asked.leave()
    bench.tell_adapters(bench.prefill, sql="1", poet="2")
    asked = Asked(bench.lifecycle("c", lora_name="poet").run())
    await settle()
    assert (bench.d.sent[-1].reserve.lora_name, bench.d.sent[-1].reserve.lora_digest) == ("poet", "2")
    await asked.leave()
    assert looked_up == ["2", "2"], "of what nobody has, nothing is cached"


async def test_two_adapters_of_one_name_are_not_paired() -> None:
    """The answer would begin with one adapter and go on with the other."""
    bench = Bench(with_prefill=True)
    bench.tell_adapters(bench.prefill, sql="old")
    bench.tell_adapters(bench.decode, sql="new")
    asked = Asked(bench.lifecycle("a", lora_name="sql").run())
    await settle()
    assert bench.d.sent[-1].generate.lora_digest == "new"
    await asked.leave()
    asked = bench.request("b")
    await settle()
    assert bench.d.sent[-1].reserve.request_id == "b", "the model is the same in both"
    assert bench.d.sent[-1].reserve.lora_digest == ""
    await asked.leave()


async def test_of_two_of_one_name_the_more_frequent_is_served(caplog: pytest.LogCaptureFixture) -> None:
    bench = Several("e", "f")
    bench.tell_adapters(bench.decode, sql="old")
    bench.tell_adapters(bench.by_name["e"], sql="old")
    bench.tell_adapters(bench.by_name["f"], sql="new")
    asked = [bench.ask(str(number), lora_name="sql") for number in range(4)]
    await settle()
    assert (len(requests_at(bench, "d")), len(requests_at(bench, "e")), requests_at(bench, "f")) == (2, 2, [])
    bench.tell_adapters(bench.by_name["e"])
    asked += [bench.ask("one each: as before", lora_name="sql")]
    await settle()
    assert requests_at(bench, "d")[-1] == "one each: as before"
    assert "another adapter of that name" not in caplog.text
    bench.tell_adapters(bench.by_name["e"], sql="new")
    asked += [bench.ask("new", lora_name="sql")]
    await settle()
    assert "new" in requests_at(bench, "e") + requests_at(bench, "f")
    assert "new requests for an adapter now go to workers with another adapter of that name" in caplog.text
    await leave(*asked)


async def test_a_stream_goes_on_with_the_adapter_that_began_it() -> None:
    bench = Several("e", worker_wait_s=30.0)
    bench.tell_adapters(bench.decode, sql="old")
    bench.tell_adapters(bench.by_name["e"], sql="new")
    begun = {
        kind: Resumption(token_ids=[5], kind=kind) for kind in (Kind("", "old"), Kind("", "new"), Kind("", "gone"))
    }
    asked = [bench.ask(kind.lora_digest, lora_name="sql", resumption=each) for kind, each in begun.items()]
    await settle()
    assert (requests_at(bench, "d"), requests_at(bench, "e")) == (["old"], ["new"])
    [command] = bench.sent("e")
    assert command.generate.lora_digest == "new"
    assert len(bench.queue) == 1, "for the third there is none: it waits"
    bench.tell_adapters(bench.decode, sql="gone")
    bench.dispatch()
    await settle()
    assert requests_at(bench, "d") == ["old", "gone"]
    await leave(*asked)


async def test_who_waits_for_an_adapter_keeps_nobody_from_workers_without_it() -> None:
    bench = Several("e")
    bench.tell_adapters(bench.decode, sql="1", poet="2")
    bench.tell_adapters(bench.by_name["e"], poet="2")
    bench.fill("d")
    asked = [bench.ask("sql", lora_name="sql"), bench.ask("sql, too", lora_name="sql"), bench.ask("model")]
    asked += [bench.ask("poet", lora_name="poet")]
    await settle()
    assert requests_at(bench, "d") == []
    assert requests_at(bench, "e") == ["model", "poet"]
    bench.free("d")
    await settle()
    assert requests_at(bench, "d") == ["sql", "sql, too"], "in the order in which they came"
    await leave(*asked)
    assert (len(bench.queue), bench.queue.num_tokens) == (0, 0)


async def test_where_all_have_it_a_long_prompt_is_not_overtaken() -> None:
    bench = Several("e")
    for handle in bench.by_name.values():
        bench.tell_adapters(handle, sql="1")
        handle.set_load(load(1))
    asked = [bench.ask("long", lora_name="sql", prompt_token_ids=PROMPT), bench.ask("short")]
    await settle()
    assert requests_at(bench, "d") + requests_at(bench, "e") == []
    bench.free("e")
    await settle()
    assert requests_at(bench, "e")[0] == "long"
    await leave(*asked)


def test_clients_hear_of_kinds_that_differ_by_adapter() -> None:
    kinds = [Kind("a"), Kind("b"), Kind("a", "1"), Kind("a", "2"), Kind("b", "1"), Kind("a\0b"), Kind("a", "b")]
    names = [kind_name(kind) for kind in kinds]
    assert len(set(names[:5])) == 5
    assert names[0] == blake2b(b"a", digest_size=16).hexdigest(), "as routers say that know of no adapters' digests"


def test_an_older_worker_has_its_adapters_in_its_compat_digest() -> None:
    record = pb.WorkerRecord(worker_id="d", incarnation="1", compat_digest="of all")
    record.model.lora_names.append("sql")
    facts = WorkerHandle(record, channel=None).facts
    assert (facts.kind_for("sql"), facts.kind_for("poet"), facts.kind_for("")) == (Kind("of all"), None, Kind("of all"))


async def test_all_answers_to_a_prompt_are_of_one_adapter() -> None:
    bench = Several("e", "f")
    bench.tell_adapters(bench.decode, sql="old")
    bench.tell_adapters(bench.by_name["e"], sql="old")
    bench.tell_adapters(bench.by_name["f"], sql="new")
    first = bench.lifecycle("1", lora_name="sql", prompt_token_ids=[5, 6])
    asked = Asked(first.run())
    await settle()
    [name] = [name for name in ("d", "e") if requests_at(bench, name)]
    session, generate = cast(ScriptedSession, bench.by_name[name].session), bench.sent(name)[0].generate
    session.say("1", generate.attempt, tokens=pb.Tokens(index=0, token_ids=[7]))
    await settle()
    assert len(asked.received) == 1
    bench.tell_adapters(bench.by_name["d" if name == "e" else "e"], sql="new")
    second = bench.ask("2", lora_name="sql", after=first)
    await settle()
    assert requests_at(bench, name) == ["1", "2"]
    assert bench.sent(name)[-1].generate.lora_digest == "old"
    await leave(asked, second)


async def test_only_what_has_begun_with_an_adapter_that_is_leaving_gets_it() -> None:
    """The client may have named the adapter, or may have another answer of it. A prefill worker may compute for it,
    too."""
    bench = Several(with_prefill=True, worker_wait_s=0.01)
    for handle in (bench.decode, bench.prefill):
        bench.tell_adapters(handle, ("sql", "old"), ("sql", "older"), ("poet", "new"), sql="new")
    older, new = Kind("", "older"), Kind("", "new")
    for resumption, lora_digest in (
        (Resumption(token_ids=[5], kind=older), "older"),
        (Resumption(kind=older), "older"),
        (Resumption(token_ids=[5], kind=new), "new"),
        (NOTHING, "new"),
    ):
        asked = bench.ask("a", lora_name="sql", resumption=resumption, prompt_token_ids=PROMPT)
        await settle()
        reserve = bench.sent("d")[-1].reserve
        assert (reserve.lora_name, reserve.lora_digest) == ("sql", lora_digest)
        await leave(asked)
    gone = Resumption(token_ids=[5], kind=Kind("", "older"))
    for other in ("poet", "third"):
        with pytest.raises(NoWorker):
            await bench.ask("b", lora_name=other, resumption=gone).task
    assert set(bench.decode.facts.kinds_for("sql")) == {Kind("", digest) for digest in ("new", "old", "older")}
    assert bench.decode.facts.kinds_for("poet") == [Kind("", "new")]
    assert bench.decode.facts.kinds_for("") == [Kind("")]


async def test_of_a_stream_whose_client_names_no_kind_what_is_cached_is_known() -> None:
    bench = Bench()
    bench.tell_adapters(bench.decode, sql="1")
    looked_up: list[str] = []

    async def longest_match(token_ids: list[int], cache_salt: str, lora_digest: str = "") -> dict[WorkerKey, int]:
        looked_up.append(lora_digest)
        return {}

    bench.cluster.prefixes.longest_match = longest_match  # type: ignore[method-assign]
    asked = Asked(bench.lifecycle("a", lora_name="sql", resumption=Resumption(token_ids=[5])).run())
    await settle()
    assert looked_up == ["1"]
    await asked.leave()


async def test_who_can_only_have_workers_with_another_adapter_of_the_name_hears_so() -> None:
    """New requests can use none of these workers: the request would wait for ever."""
    bench = Several("e", "f")
    for name, lora_digest in (("d", "old"), ("e", "old"), ("f", "new")):
        bench.tell_adapters(bench.by_name[name], sql=lora_digest)
    bench.tell(bench.by_name["f"], takes_grammars=True)
    asked = bench.ask("a", lora_name="sql", grammar="a|b")
    await settle()
    assert asked.task.done()
    with pytest.raises(NoWorker, match="with the adapter 'sql' that takes structured_outputs is available"):
        await asked.task


async def test_of_as_many_the_one_before_is_served_whichever_worker_came_first() -> None:
    bench = Several("e")
    bench.tell_adapters(bench.by_name["e"], sql="old")
    assert bench.pool.roster.kind_for("sql") == Kind("", "old")
    bench.tell_adapters(bench.decode, sql="new")
    assert bench.pool.roster.kind_for("sql") == Kind("", "old")
    bench.tell_adapters(bench.by_name["e"])
    assert bench.pool.roster.kind_for("sql") == Kind("", "new")


async def test_who_waits_for_one_of_two_of_one_name_keeps_nobody_from_workers_with_the_other() -> None:
    bench = Several("e", "f")
    for name, lora_digest in (("d", "old"), ("e", "old"), ("f", "new")):
        bench.tell_adapters(bench.by_name[name], sql=lora_digest)
    bench.fill("d", "e")
    asked = [bench.ask("sql", lora_name="sql"), bench.ask("model")]
    await settle()
    assert requests_at(bench, "f") == ["model"]
    await leave(*asked)


async def test_who_needs_what_only_newer_workers_know_keeps_nobody_from_older_ones() -> None:
    """As during an upgrade: some workers know a field, others would ignore it."""
    bench = Several("e", "f")
    for name in ("d", "e"):
        bench.tell(bench.by_name[name], takes_grammars=True)
    bench.fill("d", "e")
    asked = [bench.ask("with a grammar", grammar="a|b"), bench.ask("without")]
    await settle()
    assert requests_at(bench, "f") == ["without"]
    bench.tell(bench.by_name["f"], takes_grammars=True)
    bench.dispatch()
    await settle()
    assert requests_at(bench, "f") == ["without", "with a grammar"], "now it waits for the same workers as others"
    await leave(*asked)


async def test_an_adapter_of_workers_of_another_model_is_none_of_this_ones() -> None:
    bench = Several("e", "f")
    bench.tell(bench.by_name["f"], compat_digest="tuned")
    bench.tell_adapters(bench.by_name["f"], sql="1")
    assert bench.pool.of_another_kind == ["f"]
    asked = bench.ask("a", lora_name="sql")
    await settle()
    assert isinstance(asked.task.exception(), NoWorker)
    bench.tell_adapters(bench.decode, poet="2")
    bench.tell_adapters(bench.by_name["e"], poet="2")
    assert bench.pool.roster.adapters_of_all == {"poet"}


async def test_who_is_refused_for_its_adapter_asks_for_what_the_next_worker_has() -> None:
    """For example if the worker was restarted with another adapter of that name, which its record does not say yet."""
    bench = Several("e")
    bench.tell_adapters(bench.decode, sql="old")
    asked = bench.ask("a", lora_name="sql")
    await settle()
    [command] = bench.sent("d")
    assert command.generate.lora_digest == "old"
    bench.tell_adapters(bench.decode)
    bench.tell_adapters(bench.by_name["e"], sql="new")
    code = grpc.StatusCode.FAILED_PRECONDITION.value[0]
    failed = pb.Failed(code=code, message="lora_digest", can_retry=True)
    bench.d.say("a", command.generate.attempt, failed=failed)
    await settle()
    assert requests_at(bench, "e") == ["a"]
    assert bench.sent("e")[-1].generate.lora_digest == "new"
    assert bench.pool.ejected == []
    await leave(asked)
