from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KVLayout(_message.Message):
    __slots__ = ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim", "dtype", "order", "digest", "num_parts")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    order: str
    digest: str
    num_parts: int
    def __init__(self, num_layers: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., order: _Optional[str] = ..., digest: _Optional[str] = ..., num_parts: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("worker_id", "incarnation", "kv_address", "grant_id", "epoch", "block_ids", "num_cached_blocks", "lease_ms", "prompt_digest")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    kv_address: str
    grant_id: int
    epoch: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    num_cached_blocks: int
    lease_ms: int
    prompt_digest: bytes
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., kv_address: _Optional[str] = ..., grant_id: _Optional[int] = ..., epoch: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., num_cached_blocks: _Optional[int] = ..., lease_ms: _Optional[int] = ..., prompt_digest: _Optional[bytes] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "incarnation", "compat_digest", "layout", "transport")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COMPAT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_id: str
    incarnation: str
    compat_digest: str
    layout: KVLayout
    transport: str
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., compat_digest: _Optional[str] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., transport: _Optional[str] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("worker_id", "incarnation", "compat_digest", "layout", "grpc", "nixl", "ipc")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COMPAT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    GRPC_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    IPC_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    compat_digest: str
    layout: KVLayout
    grpc: GrpcEndpoint
    nixl: NixlEndpoint
    ipc: IpcEndpoint
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., compat_digest: _Optional[str] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., grpc: _Optional[_Union[GrpcEndpoint, _Mapping]] = ..., nixl: _Optional[_Union[NixlEndpoint, _Mapping]] = ..., ipc: _Optional[_Union[IpcEndpoint, _Mapping]] = ...) -> None: ...

class GrpcEndpoint(_message.Message):
    __slots__ = ("max_chunk_bytes",)
    MAX_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_chunk_bytes: int
    def __init__(self, max_chunk_bytes: _Optional[int] = ...) -> None: ...

class NixlEndpoint(_message.Message):
    __slots__ = ("agent_metadata", "base_address", "pool_bytes", "device_id", "memory", "ranks")
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    agent_metadata: bytes
    base_address: int
    pool_bytes: int
    device_id: int
    memory: str
    ranks: _containers.RepeatedCompositeFieldContainer[NixlEndpoint]
    def __init__(self, agent_metadata: _Optional[bytes] = ..., base_address: _Optional[int] = ..., pool_bytes: _Optional[int] = ..., device_id: _Optional[int] = ..., memory: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[NixlEndpoint, _Mapping]]] = ...) -> None: ...

class IpcEndpoint(_message.Message):
    __slots__ = ("machine", "pool_bytes", "host", "cuda", "ranks")
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CUDA_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    machine: str
    pool_bytes: int
    host: HostMemory
    cuda: CudaMemory
    ranks: MemoryOfRanks
    def __init__(self, machine: _Optional[str] = ..., pool_bytes: _Optional[int] = ..., host: _Optional[_Union[HostMemory, _Mapping]] = ..., cuda: _Optional[_Union[CudaMemory, _Mapping]] = ..., ranks: _Optional[_Union[MemoryOfRanks, _Mapping]] = ...) -> None: ...

class HostMemory(_message.Message):
    __slots__ = ("pid", "fd", "name")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    name: str
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class CudaMemory(_message.Message):
    __slots__ = ("handle", "offset", "num_bytes")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    offset: int
    num_bytes: int
    def __init__(self, handle: _Optional[bytes] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class MemoryOfRanks(_message.Message):
    __slots__ = ("cuda",)
    CUDA_FIELD_NUMBER: _ClassVar[int]
    cuda: _containers.RepeatedCompositeFieldContainer[CudaMemory]
    def __init__(self, cuda: _Optional[_Iterable[_Union[CudaMemory, _Mapping]]] = ...) -> None: ...

class PushChunk(_message.Message):
    __slots__ = ("grant_id", "epoch", "incarnation", "layer", "block_ids", "data")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    grant_id: int
    epoch: int
    incarnation: str
    layer: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, grant_id: _Optional[int] = ..., epoch: _Optional[int] = ..., incarnation: _Optional[str] = ..., layer: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PushSummary(_message.Message):
    __slots__ = ("num_bytes", "num_written", "num_late")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    num_written: int
    num_late: int
    def __init__(self, num_bytes: _Optional[int] = ..., num_written: _Optional[int] = ..., num_late: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("grant_id", "epoch", "incarnation", "num_prompt_tokens", "digests", "first_token_id")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    grant_id: int
    epoch: int
    incarnation: str
    num_prompt_tokens: int
    digests: bytes
    first_token_id: int
    def __init__(self, grant_id: _Optional[int] = ..., epoch: _Optional[int] = ..., incarnation: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., digests: _Optional[bytes] = ..., first_token_id: _Optional[int] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("outcome", "mismatched_blocks")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[CommitResponse.Outcome]
        COMMITTED: _ClassVar[CommitResponse.Outcome]
        MISMATCH: _ClassVar[CommitResponse.Outcome]
        GRANT_GONE: _ClassVar[CommitResponse.Outcome]
    OUTCOME_UNSPECIFIED: CommitResponse.Outcome
    COMMITTED: CommitResponse.Outcome
    MISMATCH: CommitResponse.Outcome
    GRANT_GONE: CommitResponse.Outcome
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MISMATCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    outcome: CommitResponse.Outcome
    mismatched_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, outcome: _Optional[_Union[CommitResponse.Outcome, str]] = ..., mismatched_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class AbandonRequest(_message.Message):
    __slots__ = ("grant_id", "epoch", "incarnation")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    grant_id: int
    epoch: int
    incarnation: str
    def __init__(self, grant_id: _Optional[int] = ..., epoch: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class AbandonResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
