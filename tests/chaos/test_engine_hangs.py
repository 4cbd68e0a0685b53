"""An engine that hangs within a step, in a process that beats on as if nothing were: it ends, its streams go on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from clusters import wait_until
from fragile_cluster import FragileCluster, ask, fresh_prompts

TIMEOUT_S = 2.0


def test_streams_leave_a_worker_whose_engine_hangs(tmp_path: Path, redis_server: Any, model_folder: Path) -> None:
    cluster = FragileCluster.start(tmp_path, redis_url=redis_server.url, model=model_folder, num_decode=2)
    try:
        hangs, service = tmp_path / "hangs", cluster.services["decode-1"]
        module = service.command.index("decode_service")
        service.command[module - 1 : module] = []  # -m
        service.command[module - 1 : module - 1] = [str(Path(__file__).with_name("hanging_worker.py")), str(hangs)]
        assert service.process is not None
        service.process.kill()
        service.process.wait()
        service.start("--engine-iteration-timeout-s", str(TIMEOUT_S))
        cluster.wait_for_workers(1)

        prompts = fresh_prompts()
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(ask, cluster, prompts)
            wait_until(lambda: cluster.workers()["decode-1"].record.load.num_running > 0, 20, "decode-1 works")
            hangs.touch()
            before_s = time.monotonic()
            assert service.process.wait(10 * TIMEOUT_S) == 1
            assert time.monotonic() - before_s > 0.8 * TIMEOUT_S
            answers = asked.result(100)
        log = service.log.read_text()
        assert "the engine stands still" in log
        assert "hanging_step" in log, "no word of where it hangs"
        hangs.unlink()
        service.start()
        cluster.wait_for_workers(1)
        cluster.wait_until_at_rest()
        assert answers == ask(cluster, prompts)  # now without faults
    finally:
        cluster.close()
