"""Fixtures of the suites over KV transports."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from kv_harness import Cluster, Receiving, running_cluster
from nixl_marks import NIXL


@pytest.fixture(params=["grpc", "ipc", NIXL, "local"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    async with running_cluster(request.param) as cluster:
        yield cluster


@pytest.fixture
async def receiving(cluster: Cluster) -> Receiving:
    return await cluster.add_receiving()
