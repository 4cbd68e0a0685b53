"""Engines whose model several processes (ranks) compute together: the same tokens, and the ranks end together."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import deepseek_cases
import numpy as np
import pytest
from clusters import RunningCluster, wait_until
from handover import alone, bytes_of, handed_over
from reference import Reference
from transformers_cases import GEMMA2

from engine.config import EngineConfig
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.outputs import RequestOutput
from engine.owned_folder import OwnedFolder, clear_left_behind
from engine.running.executor import RankLost
from engine.sampling_params import SamplingParams
from engine.tensor_parallel import group
from engine.tensor_parallel.rank_processes import CONFIG, FOLDER_PREFIX, HERE
from prefix_hash.compat import compat_difference
from protos import tandem_inference_pb2 as pb
from protos import tandem_worker_pb2 as worker_pb
from tandem.client import Client

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 301, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
    "max_position_embeddings": 256, "attention_bias": True, "mlp_bias": True,
}  # fmt: skip
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "vocab_size": 300}
DEEPSEEK = {"vocab_size": 301, "max_position_embeddings": 256, "attention_bias": True, "n_shared_experts": 1}
DEEPSEEK_V2, DEEPSEEK_V3 = deepseek_cases.V2 | DEEPSEEK, deepseek_cases.V3 | DEEPSEEK
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "norm_topk_prob": True, "mlp_only_layers": [0],
}  # fmt: skip
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
PROMPTS = [[(37 * number + 11 * i) % 290 + 5 for i in range(length)] for number, length in enumerate((5, 16, 49, 80))]
FEW_TOKENS = 6
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=0.8, seed=6, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.4),
    SamplingParams(temperature=0.0, prompt_logprobs=1),
]


def engine_of(folder: Path, config: dict[str, Any], num_ranks: int, **settings: Any) -> LLMEngine:
    return LLMEngine(engine_config(folder, config, num_ranks, **settings))


def engine_config(folder: Path, config: dict[str, Any], num_ranks: int, **settings: Any) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps(config))
    defaults = {"dtype": "float32", "num_kv_blocks": 40, "block_size": 16, "num_threads": 1, "device": "cpu"}
    args = EngineArgs(model=str(folder), load_format="dummy", tensor_parallel_size=num_ranks, **defaults | settings)
    return create_engine_config(args)


def ask(engine: LLMEngine, numbers: list[int], num_tokens: int = 12) -> dict[str, list[RequestOutput]]:
    """Run these requests at once; the audit must find no problem."""
    for number in numbers:
        params = replace(PARAMS[number], max_tokens=num_tokens, ignore_eos=True, logprobs=1)
        engine.add_request(str(number), PROMPTS[number], params)
    answers: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers.setdefault(output.request_id, []).append(output)
    ledger, problems = engine.audit()
    assert not problems
    assert ledger.num_free + ledger.num_cached == ledger.num_blocks
    return answers


def tokens_of(answers: dict[str, list[RequestOutput]]) -> dict[str, list[int]]:
    return {name: [token for output in answer for token in output.token_ids] for name, answer in answers.items()}


def test_tokens_are_those_of_transformers(model_folder: Path, references: list[Reference]) -> None:
    """The prompts run in one batch, in chunks, on three ranks, because the real model has three key heads."""
    args = EngineArgs(
        model=str(model_folder), dtype="float32", max_model_len=1024, num_kv_blocks=200, num_threads=1,
        tensor_parallel_size=3, max_num_batched_tokens=32, max_num_seqs=8,
    )  # fmt: skip
    some = [reference for reference in references if len(reference.prompt_token_ids) < 300][:4]
    assert len(some) == 4
    assert sum(len(reference.prompt_token_ids) for reference in some) > args.max_num_batched_tokens
    with closing(LLMEngine(create_engine_config(args))) as engine:
        greedy = SamplingParams(temperature=0, max_tokens=FEW_TOKENS, ignore_eos=True)
        for reference in some:
            engine.add_request(reference.name, reference.prompt_token_ids, greedy)
        answers: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                answers.setdefault(output.request_id, []).extend(output.token_ids)
    assert answers == {reference.name: list(reference.answer_token_ids[:FEW_TOKENS]) for reference in some}


def test_ranks_of_an_engine_that_is_let_go_of_end_by_themselves(tmp_path: Path) -> None:
    """When the engine is deleted without `close`, its ranks exit with 0 as their connections close; nothing kills
    them."""
    engine = engine_of(tmp_path, LLAMA, 2)
    processes = engine.executor._ranks._processes  # type: ignore[attr-defined]
    del engine
    gc.collect()
    assert [process.returncode for process in processes] == [0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LLAMA, id="biases, odd vocabulary"),
        pytest.param(DEEPSEEK_V2, id="DeepSeek-V2", marks=pytest.mark.slow),  # divided like -V3
        pytest.param(DEEPSEEK_V3, id="-V3"),
        # Its first layer has no experts.
        pytest.param(QWEN3 | EXPERTS | {"num_key_value_heads": 1}, id="Qwen3-MoE: norms of heads, tied, one key head"),
        pytest.param(MIXTRAL, id="Mixtral", marks=pytest.mark.slow),  # as Qwen3-MoE
        # See tests/unit/test_transformers_share.py.
        pytest.param(GEMMA2 | {"vocab_size": 301, "max_position_embeddings": 256}, id="Gemma 2, by transformers' code"),
    ],
)
def test_two_ranks_compute_what_one_does(config: dict[str, Any], tmp_path: Path) -> None:
    """One rank has enough blocks; two ranks have so few that some requests are preempted."""
    one = ask(engine_of(tmp_path, config, 1), [0, 1, 2, 3], num_tokens=40)
    few = {"num_kv_blocks": 10, "max_model_len": 128, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    with closing(engine_of(tmp_path, config, 2, **few)) as engine:
        two = ask(engine, [0, 1, 2, 3], num_tokens=40)
        assert engine.stats.num_preemptions > 0
    assert tokens_of(one) == tokens_of(two)
    for name in one:
        assert logprobs_of(one[name]) == pytest.approx(logprobs_of(two[name]), abs=1e-4)


@pytest.mark.slow
def test_a_step_ahead_goes_on_from_tokens_that_all_ranks_have(tmp_path: Path) -> None:
    """As on GPUs, the next step is launched before the host knows the last step's tokens."""
    expected = tokens_of(ask(engine_of(tmp_path, LLAMA, 1), [0, 1, 2]))
    config = engine_config(tmp_path, LLAMA, 2)
    config = replace(config, scheduler=replace(config.scheduler, async_scheduling=True))
    with closing(LLMEngine(config)) as engine:
        assert tokens_of(ask(engine, [0, 1, 2])) == expected


def test_weights_in_8_bits_are_shared_out(tmp_path: Path) -> None:
    """Each rank quantises its half with other scales, so the results are only nearly the same."""
    one = ask(engine_of(tmp_path, QWEN3, 1, quantization="int8"), [3])["3"]
    with closing(engine_of(tmp_path, QWEN3, 2, quantization="int8")) as engine:
        two = ask(engine, [3])["3"]
    plain = ask(engine_of(tmp_path, QWEN3, 1), [3])["3"]
    ours, theirs, others = (np.array(logprobs_of(answer[:1])) for answer in (two, one, plain))
    assert 0 < np.abs(ours - theirs).mean() < 2 * np.abs(others - theirs).mean()


def logprobs_of(answer: list[RequestOutput]) -> list[float]:
    """Return the logprobs of the most probable token at each position of the answer, and of the prompt if asked for."""
    told = [each for output in answer for each in [*(output.prompt_logprobs or ()), *(output.logprobs or ())]]
    assert told
    return [each.top[0].logprob for each in told]


@pytest.fixture(scope="module", params=["tandem", pytest.param("transformers", marks=pytest.mark.slow)])
def two_pairs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLMEngine, LLMEngine]]:
    """Two engines of two ranks each, with the CPU kernels."""
    folder, settings = tmp_path_factory.mktemp("model"), {"dtype": "bfloat16", "model_impl": request.param}
    with closing(engine_of(folder, LLAMA, 2, **settings)) as prefill:
        if prefill.config.device.attention_backend != "cpu":
            pytest.skip("no CPU kernels here")
        with closing(engine_of(folder, LLAMA, 2, **settings)) as decode:
            yield prefill, decode


def test_the_same_bits_alone_and_together(two_pairs: tuple[LLMEngine, LLMEngine]) -> None:
    """In bfloat16 with the CPU kernels, the sums over ranks do not depend on the batch."""
    engine, other = two_pairs
    together = ask(engine, [0, 1, 2])
    for number in range(3):
        answer = ask(other, [number])[str(number)]
        assert [(o.token_ids, o.logprobs) for o in answer] == [(o.token_ids, o.logprobs) for o in together[str(number)]]


def test_blocks_of_all_ranks_travel(two_pairs: tuple[LLMEngine, LLMEngine]) -> None:
    prefill, decode = two_pairs
    assert bytes_of(decode).layout.num_layers == 2 * 3
    assert bytes_of(decode).layout.num_kv_heads == 2
    for number in range(4):
        params = replace(PARAMS[number], max_tokens=12, ignore_eos=True, prompt_logprobs=None)
        prompt = [token + 1 for token in PROMPTS[number]]
        assert handed_over(prefill, decode, prompt, params) == alone(prefill, prompt, params)


@pytest.mark.slow
def test_latents_of_all_ranks_travel(tmp_path: Path) -> None:
    """Each rank has all latents, and sends its own copy."""
    with (
        closing(engine_of(tmp_path, DEEPSEEK_V3, 2)) as prefill,
        closing(engine_of(tmp_path, DEEPSEEK_V3, 2)) as decode,
    ):
        layout = bytes_of(decode).layout
        assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (2 * 3, 1, 24 + 8)
        params = replace(PARAMS[1], max_tokens=12, ignore_eos=True)
        assert handed_over(prefill, decode, PROMPTS[2], params) == alone(prefill, PROMPTS[2], params)


def test_engines_of_other_numbers_of_ranks_are_no_peers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    args = EngineArgs(model=str(tmp_path), load_format="dummy", device="cpu")
    one, two, four = (create_engine_config(replace(args, tensor_parallel_size=n)).compat_digest for n in (1, 2, 4))
    assert "tensor_parallel_size" not in one
    assert compat_difference(one, two)
    assert "tensor_parallel_size '2' != '4'" in compat_difference(two, four)


def test_a_rank_that_ends_is_noticed_in_the_next_step(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, LLAMA, 2)
    with closing(engine):
        [pid] = engine.executor.rank_pids
        engine.add_request("r", PROMPTS[0], replace(PARAMS[0], max_tokens=50, ignore_eos=True))
        assert engine.step()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 of the engine has ended with SIGKILL"):
            run_to_the_end(engine)


def test_no_rank_outlives_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the engine's process is killed in the middle of a step, its ranks end, too, even one that is stopped. The next
    engine removes the folder in which the ranks met."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    script = textwrap.dedent(
        f"""
        from engine.engine_args import EngineArgs
        from engine.llm_engine import LLMEngine
        from engine.model_loader import create_engine_config
        from engine.sampling_params import SamplingParams

        args = EngineArgs(model={str(tmp_path)!r}, load_format="dummy", device="cpu", tensor_parallel_size=2,
                          num_kv_blocks=40, num_threads=1)
        engine = LLMEngine(create_engine_config(args))
        print(*engine.executor.rank_pids, flush=True)
        engine.add_request("r", [1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True))
        while True:
            engine.step()
        """
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    with process.stdout:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 1
        assert is_running(pids[0])
        os.kill(pids[0], signal.SIGSTOP)
        process.kill()
        process.wait()
        wait_until(lambda: not is_running(pids[0]), 10.0, "the rank ends")
    (left_behind,) = tmp_path.glob("tandem-ranks-*")
    in_use = OwnedFolder(FOLDER_PREFIX)
    assert list(tmp_path.glob("tandem-ranks-*")) == [in_use.path] != [left_behind]
    clear_left_behind(FOLDER_PREFIX)
    assert in_use.path.is_dir(), "its owner lives"
    in_use.cleanup()
    assert not in_use.path.exists()


def test_a_rank_ends_with_its_engine_while_it_waits_for_others(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        fds = ",".join([str(theirs.fileno())] * 3)  # for steps; and for copies and adapters, which are not used here
        command = [sys.executable, "-m", "engine.tensor_parallel", fds, "1", str(tmp_path / "meeting")]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        ours.send_bytes(CONFIG.dump_json(engine_config(tmp_path, LLAMA, 2)))
        assert ours.poll(60.0)
        assert ours.recv_bytes() == HERE
    assert process.wait(10.0) == 0


def test_a_rank_that_never_comes_to_the_meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'engine.tensor_parallel' in sys.orig_argv:\n"
        "    from multiprocessing.connection import Connection\n"
        "    send = Connection.send_bytes\n"
        "    Connection.send_bytes = lambda self, data: (send(self, data), os._exit(3))\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(group, "MEETING", timedelta(seconds=0.5))
    with pytest.raises(RankLost, match="rank 1 of the engine has ended with 3; see its output above"):
        engine_of(tmp_path, LLAMA, 2)


def test_a_rank_that_cannot_load_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'engine.tensor_parallel' in sys.orig_argv:\n"
        "    os.write(2, b'no room here')\n"
        "    os._exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(RankLost, match="rank 1 of the engine has ended"):
        engine_of(tmp_path, LLAMA, 2)
    assert "no room here" in capfd.readouterr().err


@pytest.mark.slow
def test_a_worker_ends_with_its_rank_and_answers_go_on(
    tmp_path: Path, model_folder: Path, start_cluster: Callable[..., RunningCluster]
) -> None:
    """Prefill and decode workers have two ranks each: the tokens equal those of one rank, even if a rank is killed."""
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    config = LLAMA | {"vocab_size": 49152, "max_position_embeddings": 1024}
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    expected = alone(engine_of(tmp_path, config, 1, num_kv_blocks=64), PROMPTS[3], params)
    running = start_cluster(
        "--model", str(tmp_path), "--load-format", "dummy", "--dtype", "float32", "--kv-cache-gib", "0.1",
        "--tensor-parallel-size", "2", "--num-threads", "1", "--decode", "2",
    )  # fmt: skip
    with Client(running.address) as client:
        answer = client.generate(PROMPTS[3], temperature=0, max_tokens=40, ignore_eos=True)
        assert answer.token_ids == expected[:40]
        assert answer.timings.mode == pb.MODE_DISAGGREGATED
        assert answer.timings.kv_transfer.num_bytes == 5 * 2 * 3 * (2 * 16 * 2 * 16 * 4), "each layer of each rank"
        assert not any(worker.num_repairs for worker in running.workers()), "pushed once they were written"
        stream = client.stream(PROMPTS[3], temperature=0, max_tokens=300, ignore_eos=True)
        tokens = [token for _ in range(20) for token in next(stream).token_ids]
        workers = [each.record for each in running.workers() if each.record.role == worker_pb.ROLE_DECODE]
        [decode] = [worker for worker in workers if worker.load.num_running]
        [rank] = children_of(decode.pid)
        os.kill(rank, signal.SIGKILL)
        tokens += [token for chunk in stream for token in chunk.token_ids]
        assert tokens == expected
        wait_until(lambda: not is_running(decode.pid), 10.0, "its worker ends")
        # The prefill worker is idle.
        [prefill] = [each.record for each in running.workers() if each.record.role == worker_pb.ROLE_PREFILL]
        [rank] = children_of(prefill.pid)
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: not is_running(prefill.pid), 10.0, "its worker ends, too")

        def are_there_again() -> bool:
            """Whether both workers have been replaced. Stopping the cluster earlier would report the ended ones."""
            pids = {each.record.pid for each in running.workers()}
            return len(pids) == 3 and not pids & {decode.pid, prefill.pid}

        wait_until(are_there_again, 60.0, "all workers serve again")
    running.wait_until_at_rest()


def run_to_the_end(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def is_running(pid: int) -> bool:
    """Whether the process runs; one that has ended but is not reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
