"""Calls end by their deadline, however often the server behind their channel is restarted."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
from ports import lasting_port

from rpc.channel import channel_options

SERVER = Path(__file__).with_name("stream_server.py")
NUM_CLIENTS = 8
DEADLINE_S = 1.0
LATE_S = 1.0
"""How late a call may end after its deadline on a busy machine."""
SECONDS = 5.0


def start(port: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, str(SERVER), port], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_no_call_outlives_its_deadline() -> None:
    process, port = start(str(lasting_port()))
    is_over, begun_s, codes = threading.Event(), dict.fromkeys(range(NUM_CLIENTS), float("inf")), set()

    def call_on(number: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
            stream = channel.unary_stream("/test.Streams/Stream")
            while not is_over.is_set():
                begun_s[number] = time.monotonic()
                call = stream(b"", timeout=DEADLINE_S)
                try:
                    for _ in call:
                        pass
                except grpc.RpcError:
                    is_over.wait(0.02)
                finally:
                    call.cancel()
                codes.add(call.code())
        begun_s[number] = float("inf")

    threads = [threading.Thread(target=call_on, args=(number,), daemon=True) for number in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    end_s, dice = time.monotonic() + SECONDS, random.Random(1)
    try:
        while time.monotonic() < end_s:
            is_over.wait(dice.uniform(0.2, 0.6))
            process.send_signal(signal.SIGTERM)
            process.wait(10)
            now_s = time.monotonic()
            assert all(now_s - since_s < DEADLINE_S + LATE_S for since_s in begun_s.values()), "a call hangs"
            process, _ = start(port)
    finally:
        is_over.set()
        process.kill()
        process.wait()
    for thread in threads:
        thread.join(DEADLINE_S + LATE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert grpc.StatusCode.OK in codes
