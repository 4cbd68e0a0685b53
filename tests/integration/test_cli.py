"""The `tandem` command against a cluster that it has started: what a user types, and what it prints."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path

import psutil
import pytest
import redis
import torch
from clusters import RunningCluster, run_cluster, wait_until
from safetensors.torch import save_file

from engine.cache_dir import default_download_dir
from engine.model_loader.default_model import DEFAULT_MODEL
from rpc.errors import InvalidRequest
from rpc.version import tandem_version
from tandem.client import Client

SMALL = (
    "--served-model-name", "small,also", "--max-model-len", "4096", "--kv-cache-gib", "0.05", "--no-learn-costs",
)  # fmt: skip
LONG_PROMPT = "Count from one to a thousand: one, two, three, four, five, six, seven, eight, nine, ten, eleven,"


@pytest.fixture(scope="module")
def small(few_layers: Path) -> tuple[str, ...]:
    """Flags of clusters that start quickly."""
    return "--model", str(few_layers), *SMALL


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., RunningCluster], small: tuple[str, ...]) -> RunningCluster:
    return start_cluster(*small, "--override-generation-config", '{"min_p": 0.0}')


def tandem(*arguments: str, router: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tandem", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "TANDEM_ROUTER": router},
        check=False,
    )


@contextmanager
def running(*arguments: str, router: str = "") -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "TANDEM_ROUTER": router}
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        bufsize=0,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_model_has_the_name_it_was_given(cluster: RunningCluster) -> None:
    with Client(cluster.address) as client:
        info = client.model_info()
        assert (info.model, list(info.aliases), info.max_model_len) == ("small", ["also"], 4096)
        for name in ("small", "also"):
            assert client.generate("hello", model=name, max_tokens=1).usage.completion_tokens == 1
        with pytest.raises(InvalidRequest, match=r"must be 'small', also named 'also' or empty, is 'other'"):
            client.generate("hello", model="other")


# -- generate (answers of the real model: clients/test_real_model.py) --------------------------------------------


def test_generate_streams_as_tokens_come(cluster: RunningCluster) -> None:
    with running("generate", LONG_PROMPT, "--max-tokens", "300", "--ignore-eos", router=cluster.address) as process:
        assert process.stdout is not None
        pieces = []
        while piece := process.stdout.read(4096):
            pieces.append(piece)
        assert process.wait() == 0
    assert len(pieces) > 20, "as it comes, not at the end"


def test_flags_reach_the_sampler(cluster: RunningCluster) -> None:
    prompt = ("generate", "Once upon a time", "--max-tokens", "12")
    seeded = [tandem(*prompt, "--seed", "7", router=cluster.address).stdout for _ in range(2)]
    assert seeded[0] == seeded[1]
    greedy = tandem(*prompt, "--temperature", "0", router=cluster.address).stdout
    assert tandem(*prompt, "--seed", "8", "--top-k", "1", router=cluster.address).stdout == greedy
    assert tandem(*prompt, "--seed", "8", "--min-p", "1", router=cluster.address).stdout == greedy
    assert tandem(*prompt, "--seed", "8", "--top-p", "0.0001", router=cluster.address).stdout == greedy
    first_word = greedy.split()[0]
    stopped = tandem(
        *prompt, "--temperature", "0", "--stop", "never-said", "--stop", first_word, router=cluster.address
    )
    assert first_word not in stopped.stdout
    system = tandem(
        "generate", "Hello", "--system", "x" * 50, "--json", "--max-tokens", "1", router=cluster.address
    ).stdout
    plain = tandem("generate", "Hello", "--json", "--max-tokens", "1", router=cluster.address).stdout
    assert json.loads(system)["usage"]["prompt_tokens"] > json.loads(plain)["usage"]["prompt_tokens"] + 10


def test_flags_reach_what_is_sampled_by_without_a_word(cluster: RunningCluster) -> None:
    with Client(cluster.address) as client:
        defaults = client.model_info().default_sampling_params
    assert (defaults.HasField("min_p"), defaults.HasField("top_p")) == (True, False)


def test_generate_says_what_is_wrong_in_one_line(cluster: RunningCluster) -> None:
    done = tandem("generate", "x", "--top-p", "3", "--temperature", "-1", router=cluster.address)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "--top-p: must be in (0, 1], is 3" in line
    assert "--temperature: must be at least 0" in line


def test_ctrl_c_cancels_the_request_on_the_workers(cluster: RunningCluster) -> None:
    with running("generate", LONG_PROMPT, "--max-tokens", "3900", "--ignore-eos", router=cluster.address) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        # The first token comes from the prefill worker, perhaps before the decode worker has begun.
        wait_until(lambda: any(w.record.load.num_running for w in cluster.workers()), 20, "a worker runs it")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
        assert process.returncode == 128 + signal.SIGINT
        assert stderr.decode() == "cancelled\n"
    cluster.wait_until_at_rest(5)


# -- status and audit -------------------------------------------------------------------------------------------


def test_status_lists_the_workers(cluster: RunningCluster) -> None:
    done = tandem("status", router=cluster.address)
    assert done.returncode == 0, done.stderr
    router, version, header, *rows = done.stdout.splitlines()
    assert version == f"tandem {tandem_version()}", "all have it"
    assert f"at {cluster.address}: 0 running, 0 queued" in router
    assert header.split()[:4] == ["id", "role", "address", "pid"]
    assert [row.split()[:2] for row in rows] == [["prefill-1", "prefill"], ["decode-1", "decode"]]
    pids = {worker["record"]["worker_id"]: worker["record"]["pid"] for worker in status_json(cluster)["workers"]}
    assert pids == {name: child.pid for name, child in cluster.services().items() if name in pids}


def status_json(cluster: RunningCluster) -> dict[str, list[dict[str, dict[str, object]]]]:
    out: dict[str, list[dict[str, dict[str, object]]]] = json.loads(
        tandem("status", "--json", router=cluster.address).stdout
    )
    return out


def test_top_looks_as_often_as_it_is_told(cluster: RunningCluster) -> None:
    done = tandem("top", "--count", "2", "--interval-s", "0.2", router=cluster.address)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("generated") == 1, "the last look alone"
    assert "prefill-1" in done.stdout
    assert any(line.startswith("decode-1") for line in done.stdout.splitlines())
    assert done.stdout.endswith("\n")


def test_top_without_a_terminal_says_each_look_as_it_comes(cluster: RunningCluster) -> None:
    num_looks = 0
    with running("top", "--interval-s", "0.1", router=cluster.address) as process:
        assert process.stdout is not None
        while num_looks < 2:
            assert select.select([process.stdout], [], [], 20)[0], f"{num_looks} looks, and no further one"
            num_looks += process.stdout.readline().startswith(b"decode-1 ")
        process.stdout.close()
        assert process.wait(20) == 1, "nobody reads it any more"


def test_audit_balances(cluster: RunningCluster) -> None:
    cluster.wait_until_at_rest()
    done = tandem("audit", router=cluster.address)
    assert (done.returncode, done.stderr) == (0, "")
    for row in done.stdout.splitlines()[1:]:
        _, _, *counts, verdict = row.split()
        *owned, total_owned, total = map(int, counts)
        assert sum(owned) == total_owned == total
        assert verdict == "ok"
    assert json.loads(tandem("audit", "--json", router=cluster.address).stdout)["problems"] == []


# -- up: processes that die --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decode-1", pytest.param("prefill-1", marks=pytest.mark.slow)])
def test_a_killed_worker_is_noticed_said_and_started_again(cluster: RunningCluster, name: str) -> None:
    child = cluster.services()[name]
    child.kill()

    def is_replaced() -> bool:
        return any(w.record.worker_id == name and w.record.pid != child.pid for w in cluster.workers())

    wait_until(is_replaced, 60, f"{name} runs again", cluster.log.read_text)
    assert f"tandem: {name} ended with SIGKILL; starting it again" in cluster.log.read_text()
    prompt = f"{name}. {LONG_PROMPT}"  # one that no cache holds
    answer = tandem("generate", prompt, "--json", "--max-tokens", "2", "--ignore-eos", router=cluster.address)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["timings"]["mode"] == "disaggregated", "it serves again"


def test_a_killed_router_comes_back_on_its_port(cluster: RunningCluster) -> None:
    child = cluster.services()["router"]
    child.kill()

    def serves() -> bool:
        return tandem("generate", "hello", "--max-tokens", "1", router=cluster.address).returncode == 0

    wait_until(serves, 60, f"the router serves again at {cluster.address}", cluster.log.read_text)
    assert cluster.services()["router"].pid != child.pid


def test_requests_are_served_while_redis_does_not_answer(cluster: RunningCluster) -> None:
    redis_process = cluster.services()["redis"]
    redis_process.suspend()
    try:
        with Client(cluster.address) as client:
            answers = [
                client.generate(f"{i}. {LONG_PROMPT}", max_tokens=4, ignore_eos=True, timeout_s=20) for i in range(3)
            ]
        assert [len(answer.token_ids) for answer in answers] == [4, 4, 4]
    finally:
        redis_process.resume()


def test_a_killed_redis_comes_back_on_its_socket_and_is_filled_again(cluster: RunningCluster) -> None:
    child = cluster.services()["redis"]
    socket = child.cmdline()[0].split("unixsocket:")[1].strip()  # it sets its title: "valkey-server unixsocket:PATH"
    child.kill()

    def knows_the_workers() -> bool:
        try:
            with redis.Redis(unix_socket_path=socket, decode_responses=True) as client:
                keys = " ".join(client.keys("*"))
        except redis.RedisError:
            return False
        return "decode-1" in keys and "prefill-1" in keys

    wait_until(knows_the_workers, 30, "the workers are in Redis again", cluster.log.read_text)
    with Client(cluster.address) as client:
        assert len(client.generate("hello", max_tokens=2, ignore_eos=True).token_ids) == 2


# -- up: the end ------------------------------------------------------------------------------------------------


def test_a_hangup_and_sigterm_let_a_stream_finish(tmp_path: Path, small: tuple[str, ...]) -> None:
    with run_cluster(tmp_path / "log", *small, "--aggregated") as cluster:
        children = cluster.services()
        assert set(children) == {"redis", "router", "decode-1"}, "--aggregated starts no prefill worker"
        with Client(cluster.address) as client:
            stream = client.stream("Once upon a time", max_tokens=150, ignore_eos=True)
            messages = [next(stream)]
            os.kill(cluster.pid, signal.SIGHUP)  # its terminal is closed
            messages += stream  # raises if it breaks off
        assert sum(len(message.token_ids) for message in messages) == 150
        assert messages[-1].usage.completion_tokens == 150
        psutil.wait_procs(list(children.values()), timeout=30)
        assert [child for child in children.values() if child.is_running()] == []
        process = psutil.Process(cluster.pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            process.terminate()  # too late to change anything: `run_cluster` sees how it ended


@pytest.mark.slow
def test_ctrl_c_refuses_nothing_that_a_gateway_has_taken(tmp_path: Path, small: tuple[str, ...]) -> None:
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 3, "ignore_eos": True}).encode()
    with run_cluster(tmp_path / "log", *small, "--aggregated", "--http-port", "0") as cluster:
        host, _, port = cluster.http_address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body[:5])
            os.kill(cluster.pid, signal.SIGINT)
            wait_until(lambda: is_refused(host, int(port)), 10, "the gateway drains", cluster.log.read_text)
            connection.sendall(body[5:])
            answer = HTTPResponse(connection)
            answer.begin()
            assert answer.status == 200, answer.read()
            assert json.load(answer)["usage"]["completion_tokens"] == 3


def is_refused(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) != 0


@pytest.mark.slow
def test_ctrl_c_ends_up_though_nobody_reads_its_lines_any_more(small: tuple[str, ...]) -> None:
    """As in `tandem up 2>&1 | tee log`, where Ctrl-C ends tee, too, and sooner."""
    with running("up", *small, "--aggregated", "--listen", "127.0.0.1:0", "--no-http") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert select.select([process.stdout], [], [], 60)[0], "no ready line"
        address = process.stdout.readline().decode().strip().removeprefix("ready grpc=")
        process.stderr.close()
        with Client(address) as client:
            assert len(client.generate("hello", max_tokens=2, ignore_eos=True).token_ids) == 2, "it goes on serving"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_sigkill_leaves_no_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: tuple[str, ...]) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for the socket's folder, which no process is left to remove
    with running("up", *small, "--aggregated", "--listen", "127.0.0.1:0", "--http-port", "0") as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0], "no ready line"
        assert process.stdout.readline().startswith(b"ready grpc=127.0.0.1:")
        children = psutil.Process(process.pid).children()
        assert len(children) == 4, "Redis, the router, a worker and the gateway"
        process.kill()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_nor_does_one_while_the_model_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = default_download_dir()
    folder.mkdir(parents=True)
    with (folder / f".{DEFAULT_MODEL}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with running("up", "--listen", "127.0.0.1:0", "--no-http") as process:
            assert process.stderr is not None
            assert b"waiting for it" in process.stderr.readline()
            children = psutil.Process(process.pid).children()
            assert len(children) == 1
            process.kill()
            _, alive = psutil.wait_procs(children, timeout=10)
            for child in alive:
                child.kill()
            assert alive == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num-kv-blocks 1", "--num-kv-blocks must be at least 512"),
        ("--attention-backend cpu --dtype float32", "--attention-backend cpu cannot work here"),  # a worker knows it
        ("--redis redis://127.0.0.1:1", "no Redis answers at redis://127.0.0.1:1"),
    ],
)
def test_a_setting_that_cannot_work_ends_up_at_once_with_the_reason(flags: str, words: str) -> None:
    with running("up", *flags.split(), "--aggregated", "--listen", "127.0.0.1:0", "--no-http") as process:
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stdout == b""
    assert words in stderr.decode().split("Error: ")[-1]


def test_a_worker_whose_weights_do_not_fit_says_so_in_a_line(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": torch.zeros(97, 48)}, tmp_path / "model.safetensors")
    flags = ("--model", str(tmp_path), "--redis", "unix:///nobody", "--listen", "127.0.0.1:0")
    command = [sys.executable, "-P", "-m", "decode_service", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"Error: the weights in {tmp_path} lack the tensor \S+\n", done.stderr)


def test_a_busy_port_ends_up_at_once_with_a_way_out(cluster: RunningCluster, small: tuple[str, ...]) -> None:
    with running("up", *small, "--aggregated", "--listen", cluster.address, "--no-http") as process:
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stdout == b""
    assert f"cannot listen on {cluster.address}: Address already in use" in stderr.decode()


def test_a_router_that_cannot_listen_says_that_alone(cluster: RunningCluster) -> None:
    """By then it has already connected to the workers."""
    router = cluster.services()["router"]
    command = router.cmdline()
    command[command.index("--listen") + 1] = cluster.address
    done = subprocess.run(command, env=router.environ(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert re.fullmatch(rf"Error: cannot listen on {cluster.address}: .*\n", done.stderr)


@pytest.mark.slow  # like the HTTP port, below
@pytest.mark.parametrize(("offset", "name"), [(0, "router"), (1, "prefill-1")])
def test_a_busy_port_of_metrics_ends_up_at_once(offset: int, name: str, small: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        flags = ("--listen", "127.0.0.1:0", "--no-http", "--metrics-port", str(port - offset))
        with running("up", *small, *flags) as process:
            _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    message = stderr.decode().rpartition(f"Error: {name} ")[2]
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; take another port with --metrics-l" in message
    assert "tandem up: --metrics-port" in message
    assert "starting it again" not in stderr.decode()


@pytest.mark.slow
def test_a_busy_http_port_names_its_flag(small: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        flags = ("--aggregated", "--listen", "127.0.0.1:0", "--http-port", str(port))
        with running("up", *small, *flags) as process:
            _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in stderr.decode()
    assert "--metrics" not in stderr.decode()
    assert "tandem up: --http-port" in stderr.decode()


def test_fetch_prints_the_folder_alone(model_folder: Path) -> None:
    done = tandem("fetch", router="")
    assert (done.returncode, done.stdout) == (0, f"{model_folder}\n")


def test_the_demo_shows_a_disaggregated_request_and_stops_everything() -> None:
    before = set(psutil.Process().children())
    done = tandem("demo", router="")
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("prefill-1 -> decode-1", "bytes over grpc", "found in cache", "first token (TTFT)", "Who owns"):
        assert part in done.stdout
    assert "WRONG" not in done.stdout
    assert set(psutil.Process().children()) == before
