"""Workers that a router does not use or does not pair, and what its log says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.engine_args import EngineArgs
from engine.model_loader import create_engine_config
from prefix_hash.compat import compat_difference, join_parts
from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from registry.model_traits import read_model_traits
from router.model_info import ModelInfo
from router.peers import Peers, why_unpaired, why_unused
from rpc.session import PROTOCOL_VERSION

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "dtype": "float32",
}
STORED_IN_FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_config(tmp_path / "m")


def with_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def digest_of(folder: Path, **settings: Any) -> str:
    right: dict[str, Any] = {"load_format": "dummy", "num_kv_blocks": 16, "attention_backend": "torch"}
    return create_engine_config(EngineArgs(model=str(folder), **right | settings)).compat_digest


def record(
    role: pb.Role, incarnation: str, digest: str, *, version: int = PROTOCOL_VERSION, vocab_size: int = 64
) -> Any:
    return pb.WorkerRecord(
        worker_id=incarnation,
        incarnation=incarnation,
        role=role,
        compat_digest=digest,
        protocol_version=version,
        model=inference_pb.GetModelInfoResponse(vocab_size=vocab_size, block_size=16, max_model_len=64),
    )


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """What the log has said since the last call, and why."""
    said = [(line.message, line.why) for line in caplog.records]  # type: ignore[attr-defined]
    caplog.clear()
    return said


@pytest.mark.parametrize(
    ("config", "settings", "says"),
    [
        ({"rms_norm_eps": 1e-5}, {}, "model '"),
        ({}, {"seed": 1}, "weights 'dummy-0' != 'dummy-1'"),
        ({}, {"dtype": "bfloat16"}, "dtype 'float32' != 'bfloat16'"),
        ({}, {"block_size": 8}, "block_size '16' != '8'"),
        ({"eos_token_id": [2, 3]}, {}, "eos_token_ids '"),
        ({}, {"quantization": "int8"}, "quantization 'none' != 'int8'"),
        (STORED_IN_FP8, {}, "stored_weights 'plain' != 'fp8 in blocks of 64x128'"),
        (STORED_IN_FP8, {"quantization": "int8"}, "quantization 'none' != 'int8', stored_weights 'plain' != 'fp8 in"),
        ({}, {"kv_cache_dtype": "fp8"}, "kv_dtype 'float32' != 'float8_e4m3fn'"),
        (
            {},
            {"dtype": "bfloat16", "block_size": 8},
            "dtype 'float32' != 'bfloat16', kv_dtype 'float32' != 'bfloat16', block_size '16' != '8'",
        ),
    ],
    ids=[
        "model",
        "weights",
        "dtype",
        "block size",
        "ends",
        "8-bit weights",
        "8-bit checkpoint",
        "both",
        "8-bit pool",
        "several",
    ],
)
def test_workers_that_differ_are_not_paired_and_the_log_says_in_what(
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, Any],
    settings: dict[str, Any],
    says: str,
) -> None:
    other = with_config(tmp_path / "other", **config)
    prefill = record(pb.ROLE_PREFILL, "p", digest_of(folder))
    decode = record(pb.ROLE_DECODE, "d", digest_of(other, **settings))
    same = record(pb.ROLE_DECODE, "e", digest_of(folder, num_kv_blocks=99, max_model_len=9))
    peers = Peers(ModelInfo.from_folder(folder))
    assert peers.look_at([prefill, same, decode]) == [prefill, same, decode]
    ((message, why),) = lines(caplog)
    assert message == "workers not paired"
    assert why.startswith(f"compat_digest: {says}")

    peers.look_at([decode, same, prefill])
    assert lines(caplog) == []
    for newer, incarnation in ((decode, "d-2"), (prefill, "p-2")):
        newer.incarnation = incarnation
        peers.look_at([decode, same, prefill])
        assert lines(caplog) == [(message, why)]


def test_workers_of_different_transports_are_not_paired(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The receiver would refuse each transfer between them."""
    digest = digest_of(folder)
    prefill, decode = record(pb.ROLE_PREFILL, "p", digest), record(pb.ROLE_DECODE, "d", digest)
    prefill.transport, decode.transport = "nixl", "grpc"
    peers = Peers(ModelInfo.from_folder(folder))
    assert peers.look_at([prefill, decode]) == [prefill, decode]
    assert lines(caplog) == [("workers not paired", "transport 'nixl' != 'grpc'")]
    decode.transport, decode.incarnation = "nixl", "d-2"
    peers.look_at([prefill, decode])
    assert lines(caplog) == []


def test_the_order_of_the_bytes_is_part_of_it(folder: Path) -> None:
    digest = digest_of(folder)
    other = digest.replace("layer block kv head slot dim", "layer block head kv slot dim")
    assert compat_difference(digest, other) == (
        "compat_digest: kv_order 'layer block kv head slot dim' != 'layer block head kv slot dim'"
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": 9}, f"protocol_version is 9, ours {PROTOCOL_VERSION}"),
        ({"version": 0}, f"protocol_version is 0, ours {PROTOCOL_VERSION}"),
        ({"vocab_size": 65}, "its vocabulary has 65 tokens, ours 64"),
    ],
    ids=str,
)
def test_workers_that_are_none_of_ours(
    folder: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], why: str
) -> None:
    peers = Peers(ModelInfo.from_folder(folder))
    stranger, known = record(pb.ROLE_DECODE, "d", "x=1", **changes), record(pb.ROLE_PREFILL, "p", "x=2")
    for _ in range(3):
        assert peers.look_at([stranger, known]) == [known]
        assert peers.unused == [f"d: {why}"]
    assert lines(caplog) == [("worker not used", why)]


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("block_size", 0, "it does not say how many tokens its blocks may have"),
        ("max_model_len", 0, "it does not say how many tokens its context may have"),
        ("prefix_key", b"k" * 65, "its prefix_key has 65 bytes, a key at most 64"),
    ],
    ids=["block size", "context", "key"],
)
def test_a_worker_whose_record_nobody_could_reckon_with_is_not_used(
    folder: Path, field: str, value: Any, why: str
) -> None:
    """Planning reads the numbers of all workers for each request: one such record would fail every request."""
    malformed = record(pb.ROLE_DECODE, "d", "x=1")
    setattr(malformed if field == "prefix_key" else malformed.model, field, value)
    assert why_unused(ModelInfo.from_folder(folder), malformed) == why


WORDS = {f"w{number}": number for number in range(64)}
BYTE_PAIRS = {"model": {"type": "BPE", "vocab": WORDS}}
UNUSED_ARE_PADS = {f"w{number}" if number < 40 else f"[PAD{number}]": number for number in range(64)}


@pytest.mark.parametrize(
    ("config", "tokenizer", "why"),
    [
        ({}, BYTE_PAIRS, ""),
        ({"quantization_config": {"quant_method": "fp8"}, "dtype": "bfloat16"}, BYTE_PAIRS, ""),
        ({}, None, ""),
        ({"hidden_size": None}, BYTE_PAIRS, ""),
        ({}, {"model": {"vocab": UNUSED_ARE_PADS}}, ""),
        ({}, {"model": {"vocab": [[word, -1.5] for word in WORDS]}}, ""),
        ({}, {"model": {"vocab": [[], 1, ["x"]] * 9}}, "its tokens are others: 2 is 'x', ours 'w2'"),
        ({"num_hidden_layers": 3}, BYTE_PAIRS, "its model has 3 layers of 16, ours 2 of 16"),
        ({"hidden_size": 32}, None, "its model has 2 layers of 32, ours 2 of 16"),
        (
            {},
            {"model": {"vocab": {word: 63 - number for word, number in WORDS.items()}}},
            "its tokens are others: 2 is 'w61', ours 'w2'",
        ),
    ],
    ids=[
        "the same",
        "quantised",
        "no tokenizer",
        "sizes unknown",
        "of a GGUF file",
        "pieces with scores",
        "nonsense",
        "layers",
        "width",
        "words",
    ],
)
def test_workers_of_another_model_with_as_many_tokens(
    folder: Path, tmp_path: Path, config: dict[str, Any], tokenizer: dict[str, Any] | None, why: str
) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(BYTE_PAIRS))
    theirs = with_config(tmp_path / "elsewhere", **config)
    if tokenizer is not None:
        (theirs / "tokenizer.json").write_text(json.dumps(tokenizer))
    worker = record(pb.ROLE_DECODE, "d", "x=1")
    assert why_unused(ModelInfo.from_folder(folder), worker) == "", "an older one, that says nothing of it"
    worker.traits.CopyFrom(read_model_traits(theirs))
    assert why_unused(ModelInfo.from_folder(folder), worker) == why


@pytest.mark.parametrize(
    "theirs",
    [
        "",
        "other",
        "b=2; a=1",
        "a=1; a=1; b=2",
        "a=1; b=2; ",
        "a=1; b=2; c d=3",
        "a=1; b",
        f"a=1; b=2; {'n' * 33}=1",
        "x" * 10**6,
        "; " * 10**6,
        "; ".join(f"p{i}=1" for i in range(99)),
        "a=" + "1" * 5000,
    ],
    ids=lambda theirs: theirs[:20],
)
def test_a_digest_that_is_made_otherwise_differs_as_a_whole(theirs: str) -> None:
    ours = join_parts({"a": 1, "b": 2})
    assert compat_difference(ours, ours) == ""
    assert compat_difference(ours, theirs) == f"compat_digest: 'a=1; b=2' != {theirs[:64]!r}"
    assert compat_difference(theirs, ours).startswith("compat_digest: ")


def test_parts_that_one_digest_lacks_are_named() -> None:
    """The whole digests begin alike: in their texts, the difference would be in the part that is cut off."""
    ours = {"dtype": "bfloat16", "weights": "f" * 99}
    theirs = {"lora_modules": "abc", **ours, "kv_order": "x"}
    assert compat_difference(join_parts(ours), join_parts(theirs)) == (
        "compat_digest: lora_modules (absent) != 'abc', kv_order (absent) != 'x'"
    )
    assert compat_difference(join_parts(theirs | {"dtype": "float32"}), join_parts(ours)) == (
        "compat_digest: lora_modules 'abc' != (absent), dtype 'float32' != 'bfloat16', kv_order 'x' != (absent)"
    )


def test_of_long_parts_the_begin_is_shown() -> None:
    ours, theirs = (join_parts({"a": letter * 100}) for letter in "xy")
    assert compat_difference(ours, theirs) == f"compat_digest: a {'x' * 64!r} != {'y' * 64!r}"


def test_decode_workers_of_two_kinds_are_told_apart(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without prefill workers to compare them with, the log names each decode worker that differs from the first one,
    once, and says what differs."""
    pairs, floats = (join_parts({"dtype": "bfloat16", "cpu_arithmetic": name}) for name in ("pairs", "floats"))
    peers = Peers(ModelInfo.from_folder(folder))
    records = [
        record(pb.Role.ROLE_DECODE, name, digest)
        for name, digest in (("d-1", pairs), ("d-2", pairs), ("d-3", floats), ("d-4", floats))
    ]
    for _ in range(2):
        peers.look_at(records)
    told = [(each.worker, each.unlike, each.why) for each in caplog.records]  # type: ignore[attr-defined]
    why = "compat_digest: cpu_arithmetic 'floats' != 'pairs'"
    assert told == [("d-3", "d-1", why), ("d-4", "d-1", why)]


def test_the_log_tells_once_of_two_workers_that_take_turns_in_one_record(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = record(pb.Role.ROLE_DECODE, "1", "same"), record(pb.Role.ROLE_DECODE, "2", "same")
    for one, other in ((first, "b:1"), (second, "a:1")):
        one.worker_id, one.rival_address = "d", other
    first.address, second.address = "a:1", "b:1"
    peers = Peers(ModelInfo.from_folder(folder))
    for written in (first, second, first, second):
        peers.look_at([written])
    (told,) = caplog.records
    assert (told.message, told.worker, told.addresses) == ("two workers of one id", "d", "a:1 and b:1")  # type: ignore[attr-defined]
    assert told.fix == "drain one, or give it another --worker-id"  # type: ignore[attr-defined]
    second.model.vocab_size = 65
    for written in (first, second, first, second):
        peers.look_at([written])
    assert [each.message for each in caplog.records] == ["two workers of one id", "worker not used"]


def test_of_many_workers_of_two_kinds_the_log_says_it_once_and_of_one_that_comes_again(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two thousand workers, half of them of another kind, as in an upgrade. Comparing all pairs whenever a worker comes
    or goes would compare half a million."""
    compared: list[str] = []

    def compare(prefill: pb.WorkerRecord, decode: pb.WorkerRecord) -> str:
        compared.append(decode.worker_id)
        return why_unpaired(prefill, decode)

    monkeypatch.setattr("router.peers.why_unpaired", compare)
    peers = Peers(ModelInfo.from_folder(folder))
    records = [
        record(role, f"{name}-{kind}-{number}", f"weights={kind}")
        for role, name in ((pb.ROLE_PREFILL, "p"), (pb.ROLE_DECODE, "d"))
        for kind in ("old", "new")
        for number in range(500)
    ]
    for _ in range(2):
        peers.look_at(records)
    told = [(each.prefill, each.decode, each.num_pairs) for each in caplog.records]  # type: ignore[attr-defined]
    assert told == [("p-old-499", "d-new-499", 250_000), ("p-new-499", "d-old-499", 250_000)]
    assert len(compared) == 2 * 4

    caplog.clear()
    peers.look_at([*records, record(pb.ROLE_DECODE, "d-new-500", "weights=new")])
    told = [(each.prefill, each.decode, each.num_pairs) for each in caplog.records]  # type: ignore[attr-defined]
    assert told == [("p-old-0", "d-new-500", 500 * 501)]
