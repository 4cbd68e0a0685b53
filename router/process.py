"""The router process, from its flags to its exit code.

flags ──> model's texts loaded ──> listening ──first decode worker──> SERVING ──SIGTERM──> draining: new requests are
          (bad folder: exit 2)     NOT_SERVING <──last one gone──┘                         refused, running ones finish
                                                                                           (bounded) ──> exit 0
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from pathlib import Path

import click

from protos import tandem_worker_pb2 as pb
from protos.tandem_inference_pb2_grpc import add_InferenceServicer_to_server, add_TokenizerServicer_to_server
from protos.tandem_worker_pb2_grpc import add_ClusterServicer_to_server
from registry.prefix_index import PrefixIndex
from registry.workers import WorkerDirectory
from router.args import RouterArgs
from router.cluster_servicer import ClusterServicer
from router.forecast import Forecast
from router.gauges import RouterGauges
from router.generation_defaults import GenerationDefaults
from router.metrics import RouterMetrics
from router.model_info import ModelInfo
from router.parts import RouterParts
from router.peers import Peers
from router.policy import PolicyConfig
from router.prefix_lookup import PrefixLookup
from router.queue import RequestQueue
from router.rebalancer import Rebalancer
from router.retry_budget import RetryBudget
from router.served_model import Texts
from router.servicer import InferenceServicer
from router.text.chat_template import ChatTemplate
from router.text.template_kwargs import check_default_kwargs
from router.text.tokenizer import Tokenizer
from router.tokenizer_servicer import TokenizerServicer
from router.worker_pool import WorkerPool
from rpc.entrypoint import announce, with_flags
from rpc.http import HttpServer, show_metrics, tell_of_process
from rpc.otlp_endpoint import create_tracing
from rpc.server import Server
from rpc.tracing import Tracing

_log = logging.getLogger(__name__)

INFERENCE_SERVICE = "tandem.v1.Inference"
TOKENIZER_SERVICE = "tandem.v1.Tokenizer"
CLUSTER_SERVICE = "tandem.v1.Cluster"
DEFAULT_CONTEXT = 131_072
"""For the edges of histograms, if the model's own context length is not known."""
TRANSPORT_MARGIN = 4
"""gRPC itself rejects messages of more than this many times `max_message_bytes`. Below that, the router's error names
the field that is too large."""


async def run_router(args: RouterArgs, policy: PolicyConfig, stop: asyncio.Event) -> int:
    """Serve until `stop` is set. Returns the exit code."""
    try:
        tracing = create_tracing(args.otlp_traces_endpoint, "tandem-router")
        texts = await asyncio.to_thread(load_texts, args)
    except ValueError as error:
        click.echo(f"Error: {with_flags(str(error), vars(args))}", err=True)
        return 2
    router = Router(args, policy, texts, tracing)
    try:
        await router.start()
        await stop.wait()
        await router.drain(args.drain_grace_s)
    finally:  # also if it cannot listen: by then it has opened sessions to workers
        await router.close()
    await asyncio.to_thread(tracing.close)
    return 0


def load_texts(args: RouterArgs) -> Texts:
    """Load tokenizer, chat template and defaults from the model's folder. Raises `ValueError` naming what it lacks."""
    variables = check_default_kwargs(args.default_chat_template_kwargs)
    if args.chat_template:
        template: ChatTemplate | None = ChatTemplate.from_file(args.chat_template, args.model, defaults=variables)
    else:
        template = ChatTemplate.from_folder(args.model, defaults=variables)
    defaults = GenerationDefaults.of(Path(args.model), args.generation_config, args.override_generation_config)
    info = ModelInfo.from_folder(args.model, served_model_name=args.served_model_name, defaults=defaults)
    return Texts(
        model=info.with_chat(template, args.tool_call_parser, args.reasoning_parser),
        tokenizer=Tokenizer.from_folder(args.model),
        chat_template=template,
    )


class Router:
    """The parts of the router process. Create it on the event loop."""

    def __init__(self, args: RouterArgs, policy: PolicyConfig, texts: Texts, tracing: Tracing) -> None:
        router_id = f"router-{secrets.token_hex(3)}"
        self._server = Server(
            args.listen,
            max_message_bytes=TRANSPORT_MARGIN * args.max_message_bytes,
            tls=args.server_tls(),
            keys=args.api_key,
        )
        self._peers = Peers(texts.model)
        self._pool = WorkerPool(
            router_id=router_id,
            policy=policy,
            on_change=self._on_change,
            tls=args.client_tls,
            is_registry_reachable=lambda: self._directory.is_reachable,
        )
        self._queue = RequestQueue(
            max_tokens=args.max_queue_tokens,
            choose=self._pool.choose,
            has_workers=self._pool.has_decode_worker_for,
            has_fewer_workers=self._pool.has_fewer_workers,
            workers_for=self._pool.workers_for,
            worker_wait_s=args.worker_wait_s,
        )
        self._index = PrefixIndex(args.redis, namespace=args.namespace)
        self._directory = WorkerDirectory(args.redis, namespace=args.namespace, on_change=self._on_records)
        name = texts.model.served_model_name
        self._metrics = RouterMetrics(
            name,
            texts.model.max_model_len or DEFAULT_CONTEXT,
            good_ttft_ms=args.good_ttft_ms,
            good_tpot_ms=args.good_tpot_ms,
        )
        prefixes = PrefixLookup(self._index, self._pool)
        rebalancer = Rebalancer(policy, self._pool, self._queue)
        parts = RouterParts(self._pool, self._queue, prefixes, RetryBudget(), Forecast(), self._metrics, rebalancer)
        self._inference = InferenceServicer(
            texts=texts,
            parts=parts,
            max_request_bytes=args.max_message_bytes,
            takes_priorities=args.scheduling_policy == "priority",
            tracing=tracing,
        )
        self._tokenizer = TokenizerServicer(texts=texts, pool=self._pool, max_request_bytes=args.max_message_bytes)
        self._add_services(router_id, parts)
        gauges = RouterGauges(name, parts=parts, open_requests=self._inference.open_requests)
        self._metrics.registry.register(gauges)
        tell_of_process(self._metrics.registry)
        self._metrics_listen = args.metrics_listen
        self._metrics_server: HttpServer | None = None

    def _add_services(self, router_id: str, parts: RouterParts) -> None:
        operators = ClusterServicer(
            router_id=router_id,
            parts=parts,
            open_requests=self._inference.open_requests,
            unused=lambda: self._peers.unused,
        )
        self._server.add(add_InferenceServicer_to_server, self._inference, INFERENCE_SERVICE)
        self._server.add(add_TokenizerServicer_to_server, self._tokenizer, TOKENIZER_SERVICE)
        self._server.add(add_ClusterServicer_to_server, operators, CLUSTER_SERVICE)

    async def start(self) -> None:
        await self._directory.start()
        self._metrics_server = show_metrics(
            self._metrics.registry, self._metrics_listen, lambda: self._server.is_serving(INFERENCE_SERVICE)
        )
        address = await self._server.start()
        self._server.set_serving(TOKENIZER_SERVICE, True)
        self._server.set_serving(CLUSTER_SERVICE, True)
        announce(address)
        _log.info("listening", extra={"address": address})

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests; wait, at most `grace_s` seconds, until the running ones have ended."""
        _log.info("draining", extra={"num_running": len(self._inference.open_requests), "grace_s": grace_s})
        self._server.enter_drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._inference.drain()
        except TimeoutError:
            _log.warning("requests still ran when the grace period ended")

    async def close(self) -> None:
        await self._server.drain(0)
        await self._inference.close()
        self._tokenizer.close()
        if self._metrics_server is not None:
            await self._metrics_server.close()
        await self._directory.close()
        await self._pool.close()
        await self._index.close()

    def _on_records(self, records: list[pb.WorkerRecord]) -> None:
        self._pool.set_records(self._peers.look_at(records))

    def _on_change(self) -> None:
        self._server.set_serving(INFERENCE_SERVICE, self._pool.has_decode_worker)
        self._queue.dispatch_soon()
