"""What people use: the offline `LLM` and `AsyncLLM`, clients, the local `Cluster` and the `tandem` command.

    from tandem import LLM, SamplingParams     # in this process, no services
    from tandem import AsyncLLM                # likewise, for asyncio
    from tandem import Client, AsyncClient     # talks to a router
    from tandem import Cluster, ClusterArgs    # starts Redis, router and workers on this machine

Names are imported on first use, so that a client needs no torch, and the command handles Ctrl-C from its first moment.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
"""True for a type checker. Not imported from typing, which takes longer to import than everything that the command
needs before it can handle Ctrl-C."""
if TYPE_CHECKING:
    from typing import Any

    from engine.async_llm_engine import EngineDeadError
    from engine.engine_args import EngineArgs
    from rpc.errors import (
        CorruptKV,
        DeadlinePassed,
        Draining,
        Incompatible,
        InternalError,
        InvalidRequest,
        LeaseGone,
        NotFound,
        NoWorker,
        Outdated,
        Overloaded,
        RequestCancelled,
        RequestExists,
        TandemError,
        Unauthenticated,
        Unreachable,
    )
    from rpc.tls import ClientTLS
    from tandem.answer import Answer, StreamBroken
    from tandem.async_llm import AsyncEngineArgs, AsyncLLM
    from tandem.beam_search import BeamSearchOutput, BeamSearchSequence
    from tandem.client import AsyncClient, Client
    from tandem.client_base import ClientClosed
    from tandem.cluster import Cluster, ClusterError
    from tandem.cluster_args import ClusterArgs
    from tandem.llm import LLM, CompletionOutput, Logprob, LoRARequest, RequestOutput
    from tandem.prompts import TextPrompt, TokensPrompt
    from tandem.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from tandem.structured_outputs import StructuredOutputsParams

    __version__: str

_HOME = {
    "AsyncEngineArgs": "tandem.async_llm",
    "AsyncLLM": "tandem.async_llm",
    "EngineDeadError": "tandem.async_llm",
    "EngineArgs": "engine.engine_args",
    "SamplingParams": "tandem.sampling_params",
    "BeamSearchOutput": "tandem.beam_search",
    "BeamSearchParams": "tandem.sampling_params",
    "BeamSearchSequence": "tandem.beam_search",
    "Answer": "tandem.answer",
    "StreamBroken": "tandem.answer",
    "AsyncClient": "tandem.client",
    "ClientTLS": "rpc.tls",
    "Client": "tandem.client",
    "ClientClosed": "tandem.client_base",
    "CorruptKV": "rpc.errors",
    "DeadlinePassed": "rpc.errors",
    "Draining": "rpc.errors",
    "Incompatible": "rpc.errors",
    "InternalError": "rpc.errors",
    "InvalidRequest": "rpc.errors",
    "LeaseGone": "rpc.errors",
    "NoWorker": "rpc.errors",
    "NotFound": "rpc.errors",
    "Outdated": "rpc.errors",
    "Overloaded": "rpc.errors",
    "RequestCancelled": "rpc.errors",
    "RequestExists": "rpc.errors",
    "TandemError": "rpc.errors",
    "Unauthenticated": "rpc.errors",
    "Unreachable": "rpc.errors",
    "Cluster": "tandem.cluster",
    "ClusterArgs": "tandem.cluster_args",
    "ClusterError": "tandem.cluster",
    "LLM": "tandem.llm",
    "CompletionOutput": "tandem.llm",
    "LoRARequest": "tandem.llm",
    "Logprob": "tandem.llm",
    "RequestOutput": "tandem.llm",
    "RequestOutputKind": "tandem.sampling_params",
    "StructuredOutputsParams": "tandem.structured_outputs",
    "TextPrompt": "tandem.prompts",
    "TokensPrompt": "tandem.prompts",
}

__all__ = [
    "LLM",
    "Answer",
    "AsyncClient",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "Client",
    "ClientClosed",
    "ClientTLS",
    "Cluster",
    "ClusterArgs",
    "ClusterError",
    "CompletionOutput",
    "CorruptKV",
    "DeadlinePassed",
    "Draining",
    "EngineArgs",
    "EngineDeadError",
    "Incompatible",
    "InternalError",
    "InvalidRequest",
    "LeaseGone",
    "LoRARequest",
    "Logprob",
    "NoWorker",
    "NotFound",
    "Outdated",
    "Overloaded",
    "RequestCancelled",
    "RequestExists",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StreamBroken",
    "StructuredOutputsParams",
    "TandemError",
    "TextPrompt",
    "TokensPrompt",
    "Unauthenticated",
    "Unreachable",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from rpc.version import tandem_version

        return tandem_version()
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
