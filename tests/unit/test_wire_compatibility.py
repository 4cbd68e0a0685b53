"""What processes of two versions must agree on, as it was recorded: an upgrade runs both beside each other, and nothing
else would notice that they mean different things. If a test fails, the change is wrong, or needs what the test says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from llama_folders import config_of, folder_with
from test_sampler import draw, sequence

import prefix_hash
from protos import tandem_inference_pb2, tandem_kv_transfer_pb2, tandem_worker_pb2

RECORD = Path(__file__).with_name("wire_fields.txt")
TYPES = {
    number: name.removeprefix("TYPE_").lower() for name, number in vars(FieldDescriptor).items() if name[:5] == "TYPE_"
}


def in_file(module: ModuleType) -> Iterator[str]:
    """A line for each method, field and value that the wire has."""
    for service in module.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            asked, told = (
                ("stream " if is_stream else "") + kind.name
                for kind, is_stream in (
                    (method.input_type, method.client_streaming),
                    (method.output_type, method.server_streaming),
                )
            )
            yield f"{service.full_name}.{method.name}({asked}) -> {told}"
    for enum in module.DESCRIPTOR.enum_types_by_name.values():
        yield from in_enum(enum)
    for message in module.DESCRIPTOR.message_types_by_name.values():
        yield from in_message(message)


def in_message(message: Descriptor) -> Iterator[str]:
    for field in message.fields:
        kind = field.message_type or field.enum_type
        type_name = ("repeated " if field.is_repeated else "") + (kind.full_name if kind else TYPES[field.type])
        yield f"{message.full_name} {field.number}: {type_name} {field.name}"
    for inner in message.nested_types:
        yield from in_message(inner)
    for enum in message.enum_types:
        yield from in_enum(enum)


def in_enum(enum: EnumDescriptor) -> Iterator[str]:
    for value in enum.values:
        yield f"{enum.full_name} {value.number}: {value.name}"


def test_every_number_on_the_wire_keeps_its_meaning() -> None:
    """A number that is no longer used: make it `reserved`, and delete its line. A new meaning needs a new number; a
    part of a request that changes the answer also needs a `takes_…` in `WorkerRecord`, since older workers ignore it.
    """
    recorded = RECORD.read_text().splitlines()
    now = [line for each in (tandem_inference_pb2, tandem_worker_pb2, tandem_kv_transfer_pb2) for line in in_file(each)]
    gone = [line for line in recorded if line not in now]
    assert not gone, "processes of earlier versions still send or expect these"
    new = [line for line in now if line not in recorded]
    assert not new, f"add to {RECORD.name}:\n" + "\n".join(new)


def test_blocks_have_the_same_hashes() -> None:
    """Else routers and workers of two versions would not find each other's cached prefixes, and prefill workers would
    refuse decode workers' grants. A change needs another text in `prefix_key`, so that the index's keys differ."""
    key = prefix_hash.prefix_key("weights=1")
    assert [each.hex() for each in prefix_hash.block_hashes(range(40), 16, key)] == [
        "e579de6c6b538ab9f1cc99034a339413",
        "0d8fae2a9976c0fd603bc1c895ccc92a",
    ]
    assert prefix_hash.salted_key(key, "salt", "adapter").hex()[:16] == "4f3171422a4bf632"
    assert prefix_hash.prompt_digest([1, 2, 3], key).hex() == "e923c4cf7dff00d7fc6d7319d02c80af"


def test_workers_of_one_model_have_the_same_digest(tmp_path: Path) -> None:
    """Else an upgrade makes two clusters of one. It must if KV or answers differ: then increase `KV_FORMAT_VERSION`, or
    the kernels' `ARITHMETIC_VERSION`. A new property of models must be left out of the digest of those without it."""
    config = config_of(folder_with(tmp_path / "m"), attention_backend="torch", device="cpu", block_size=16)
    assert config.compat_digest == (
        "kv_format_version=1; dtype=float32; quantization=none; kv_dtype=float32; block_size=16; "
        "kv_order=layer block kv head slot dim; model=e9ad144abd7803d4a9e055a4e46cd252; stored_weights=plain; "
        "weights=dummy-0; eos_token_ids=18b0b6bc0e447e78253e2814c47e99a2"
    )


def test_a_seed_draws_the_same_tokens() -> None:
    """Else a stream that moves during an upgrade continues with tokens of another answer. A change needs a new part of
    the compat digest."""
    values = torch.linspace(-2, 2, 1000).expand(6, -1)
    seqs = [
        sequence(seed=seed, output=[5] * length, temperature=0.9) for seed in (1, -2, 2**63 - 1) for length in (0, 3)
    ]
    assert draw(values, seqs).tolist() == [34, 884, 980, 806, 922, 894]
