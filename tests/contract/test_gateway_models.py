# ruff: noqa: N802 - gRPC's method names
"""A gateway in front of the routers of two models: each request goes to the routers of the model that it names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2 as httpx
import pytest
from gateway_harness import TIMEOUT_S, Router, events_of, failing

from gateway.args import GatewayArgs
from gateway.process import run_gateway
from protos import tandem_inference_pb2 as pb
from protos import tandem_inference_pb2_grpc
from rpc.errors import InvalidRequest
from rpc.server import Server


class Named(Router):
    """The router of one model. While `known` is not set, it does not answer what it serves."""

    def __init__(self, model: str, aliases: tuple[str, ...] = (), lora_names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.info = pb.GetModelInfoResponse(model=model, aliases=aliases, lora_names=lora_names, max_model_len=64)
        self.known = asyncio.Event()
        self.known.set()
        self.is_asked = asyncio.Event()
        self.num_asked = 0

    async def start(self) -> str:
        self.server = Server("127.0.0.1:0")
        self.server.add(tandem_inference_pb2_grpc.add_InferenceServicer_to_server, self, "tandem.v1.Inference")
        self.address = await self.server.start()
        self.server.set_serving("tandem.v1.Inference", True)
        return self.address

    async def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        self.is_asked.set()
        self.num_asked += 1
        await self.known.wait()
        return self.info


@asynccontextmanager
async def before(*routers: Named, **more: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Run a gateway in front of these routers. `more`: further flags of the gateway. It leaves when the first router's
    `stop` is set."""
    async with AsyncExitStack() as servers, asyncio.timeout(3 * TIMEOUT_S):
        addresses = []
        for router in routers:
            addresses.append(await router.start())
            servers.push_async_callback(router.server.drain, 0)
        stop, announced = routers[0].stop, asyncio.get_running_loop().create_future()
        args = GatewayArgs(router=tuple(addresses), listen="127.0.0.1:0", resume_s=0.0, **more)
        running = asyncio.create_task(run_gateway(args, stop, announce=announced.set_result))
        async with httpx.AsyncClient(
            base_url=f"http://{await announced}", timeout=TIMEOUT_S, trust_env=False, verify=False
        ) as http:
            try:
                yield http
            finally:
                stop.set()
                await asyncio.wait([running])
        assert running.result() == 0


async def ask(http: httpx.AsyncClient, model: str | None, **more: Any) -> httpx.Response:
    return await http.post("/v1/completions", json={"prompt": "a b", "model": model, **more})


@pytest.fixture
def big() -> Named:
    return Named("big", aliases=("gpt-x",))


@pytest.fixture
def small() -> Named:
    return Named("small", lora_names=("sql",))


async def test_each_request_goes_to_the_routers_of_its_model(big: Named, small: Named) -> None:
    async with before(big, small) as http:
        for model, router in (("small", small), ("big", big), ("sql", small), ("gpt-x", big)):
            answer = await ask(http, model)
            assert (answer.status_code, answer.json()["model"]) == (200, model)
            assert router.requests.pop().model == model
            streamed = await ask(http, model, stream=True)
            assert events_of(streamed.text)[-1] == "[DONE]"
            assert router.requests.pop().model == model
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ("/v1/responses", {"input": "hi"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
        ):
            assert (await http.post(path, json={"model": "sql", **body})).status_code == 200
            assert small.requests.pop().model == "sql"
        assert not big.requests


async def test_all_models_are_listed(big: Named, small: Named) -> None:
    async with before(big, small) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(each["id"], each["parent"]) for each in listed] == [
            ("big", None), ("gpt-x", None), ("small", None), ("sql", "small")
        ]  # fmt: skip
        assert (await http.get("/v1/models/sql")).json()["parent"] == "small"


async def test_of_two_that_serve_a_name_the_first_is_asked(big: Named) -> None:
    other = Named("other", aliases=("gpt-x",))
    async with before(big, other) as http:
        assert [each["root"] for each in (await http.get("/v1/models")).json()["data"]] == ["big", "big", "other"]
        for _ in range(3):
            assert (await ask(http, "gpt-x")).status_code == 200
        assert (len(big.requests), len(other.requests)) == (3, 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/v1/models/medium"])
async def test_a_name_that_none_has_is_told_which_there_are(path: str, big: Named, small: Named) -> None:
    async with before(big, small) as http:
        asked = http.get(path) if "models" in path else http.post(path, json={"model": "medium", "prompt": "a"})
        refused = await asked
        assert refused.status_code == 404
        assert refused.json()["error"] == {
            "message": "model: the model 'medium' does not exist; available: 'big', 'gpt-x', 'small', 'sql'",
            "type": "invalid_request_error", "param": "model", "code": "model_not_found",
        }  # fmt: skip


async def test_a_request_says_which_of_them_it_is_for(big: Named, small: Named) -> None:
    async with before(big, small) as http:
        for _ in range(2):
            refused = await ask(http, None, request_id="named")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        assert refused.headers["x-request-id"] == "named"
        assert refused.json()["error"]["message"] == "model: must be given; available: 'big', 'gpt-x', 'small', 'sql'"


async def test_that_a_request_names_none_is_said_also_where_no_router_answers(big: Named, small: Named) -> None:
    async with before(big, small) as http:
        await big.server.drain(0)
        await small.server.drain(0)
        refused = await ask(http, None)
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "model: must be given")


async def test_an_adapter_that_comes_is_found(big: Named, small: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.models.MAX_AGE_S", 0.0)
    async with before(big, small) as http:
        assert (await ask(http, "poems")).status_code == 404
        small.info.lora_names.append("poems")
        assert (await ask(http, "poems")).status_code == 200
        small.info.lora_names.remove("poems")
        assert (await ask(http, "big")).status_code == 200  # refreshes the list of models meanwhile
        while (await ask(http, "poems")).status_code != 404:
            pass
        big.info.lora_names.append("poems")
        assert (await ask(http, "poems")).status_code == 200
        assert [request.model for request in big.requests] == ["big", "poems"]


async def test_the_others_are_served_while_the_routers_of_one_do_not_answer(big: Named, small: Named) -> None:
    """First while the other model's router hangs, then after it is gone."""
    small.known.clear()
    async with before(small, big) as http:
        async with asyncio.timeout(TIMEOUT_S / 2):  # well below the ten seconds of a question to a router
            assert (await ask(http, "big")).status_code == 200
            assert (await http.get("/health")).status_code == 200
        small.known.set()
        assert (await ask(http, "small")).status_code == 200
        await small.server.drain(0)
        assert (await ask(http, "small")).status_code == 503
        assert (await ask(http, "big")).status_code == 200
        listed = (await http.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == ["big", "gpt-x"]
        assert (await http.get("/health")).status_code == 200
        await big.server.drain(0)
        assert (await http.get("/health")).status_code == 503
        assert (await http.get("/v1/models")).status_code == 503


async def test_the_log_says_once_whose_routers_do_not_answer(
    big: Named, small: Named, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """/health stays 200, since the other model is served."""
    monkeypatch.setattr("gateway.models.MAX_AGE_S", 0.0)
    async with before(big, small) as http:
        await small.server.drain(0)
        for _ in range(3):
            assert (await ask(http, "poems")).status_code == 503
            assert (await http.get("/health")).status_code == 200
        (told,) = [each for each in caplog.records if each.message.startswith("router does not say what it serves")]
        assert told.__dict__["router"] == small.address


async def test_whether_a_name_is_there_cannot_be_said_while_somebody_may_have_it(big: Named) -> None:
    small = Named("small")
    async with before(big, small) as http:
        await small.server.drain(0)
        refused = await ask(http, "poems")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert "no router that answers has 'poems', and some do not answer" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert (await ask(http, "big")).status_code == 200


@asynccontextmanager
async def before_one_that_hangs(big: Named, small: Named) -> AsyncIterator[httpx.AsyncClient]:
    """Run a gateway in front of a router that hangs; the test must take less time than a question to a router may."""
    small.known.clear()
    async with before(big, small, drain_grace_s=0.2) as http, asyncio.timeout(TIMEOUT_S / 2):
        yield http


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_deadline_holds_while_routers_are_asked(path: str, big: Named, small: Named) -> None:
    async with before_one_that_hangs(big, small) as http:
        late = await http.post(path, json={"model": "poems", "prompt": "a"}, headers={"x-request-timeout-ms": "100"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_the_time_that_asking_takes_is_of_the_deadline(big: Named, small: Named) -> None:
    async with before_one_that_hangs(big, small) as http:
        asking = http.post(
            "/v1/completions", json={"model": "small", "prompt": "a"}, headers={"x-request-timeout-ms": "3000"}
        )
        asked = asyncio.create_task(asking)
        await small.is_asked.wait()
        await asyncio.sleep(0.3)  # this time must count
        small.known.set()
        assert (await asked).status_code == 200
        (left_s,) = small.deadlines_s
        assert left_s is not None
        assert left_s < 2.8


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_who_leaves_waits_for_no_router(path: str, big: Named, small: Named) -> None:
    async with before_one_that_hangs(big, small) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post(path, json={"model": "poems", "prompt": "a"}, timeout=0.1)
        while 'status="499"' not in (await http.get("/metrics")).text:
            pass


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_gateway_that_leaves_waits_for_no_router(path: str, big: Named, small: Named) -> None:
    async with before_one_that_hangs(big, small) as http:
        asked = asyncio.create_task(http.post(path, json={"model": "poems", "prompt": "a"}))
        await small.is_asked.wait()
        big.stop.set()
        told = await asked
        assert (told.status_code, "shutting down" in told.json()["error"]["message"]) == (503, True)


async def test_many_who_ask_for_what_nobody_has_are_one_question_a_second(big: Named, small: Named) -> None:
    async with before_one_that_hangs(big, small) as http:
        asking = [asyncio.create_task(ask(http, f"poems-{number}")) for number in range(20)]
        await small.is_asked.wait()
        assert (await ask(http, "big")).status_code == 200
        small.known.set()
        assert {(await each).status_code for each in asking} == {404}
        assert (await ask(http, "small")).status_code == 200
        assert big.num_asked + small.num_asked < 5


async def test_what_no_router_need_be_asked_for_is_said_while_one_hangs(big: Named, small: Named) -> None:
    async with before_one_that_hangs(big, small) as http:
        refused = await ask(http, None)
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            400,
            "model: must be given; available: 'big', 'gpt-x'",
        )
        assert [each["id"] for each in (await http.get("/v1/models")).json()["data"]] == ["big", "gpt-x"]


async def test_who_hangs_is_listed_as_it_was_until_that_is_an_outage(big: Named, small: Named) -> None:
    """The router that hangs may be one of several of its model."""
    async with before(big, small) as http, asyncio.timeout(TIMEOUT_S / 2):
        for _ in range(2):
            listed = (await http.get("/v1/models")).json()["data"]
            assert [each["id"] for each in listed] == ["big", "gpt-x", "small", "sql"]
            small.known.clear()


async def test_a_name_that_has_gone_to_another_cluster_is_found_there(big: Named, small: Named) -> None:
    """Also if no request has named it since."""
    async with before(big, small) as http:
        assert (await ask(http, "sql")).status_code == 200
        small.info.lora_names.remove("sql")
        small.script = failing(InvalidRequest([("model", "must be 'small' or empty, is 'sql'")]))
        refused = await ask(http, "sql")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert "available: 'big', 'gpt-x', 'small'" in refused.json()["error"]["message"]
        small.info.lora_names.append("sql")
        await http.get("/v1/models")
        small.info.lora_names.remove("sql")
        big.info.lora_names.append("sql")
        assert (await http.get("/v1/models/sql")).json()["parent"] == "big"
        assert (await ask(http, "sql", stream=True)).status_code == 200
        assert big.requests.pop().model == "sql"


def test_routers_are_given_once_each() -> None:
    with pytest.raises(ValueError, match=r"router: a:1 is given twice; give each address once"):
        GatewayArgs(router=("a:1", "b:1", "a:1"))
    for wrong in ((), ("a:1", "")):
        with pytest.raises(ValueError, match="router must be HOST:PORT or a gRPC target, is empty"):
            GatewayArgs(router=wrong)
    with pytest.raises(ValueError, match=r"router: .*HOST:PORT"):
        GatewayArgs(router=("a:1", "b"))
