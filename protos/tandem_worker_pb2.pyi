from protos import tandem_inference_pb2 as _tandem_inference_pb2
from protos import tandem_kv_transfer_pb2 as _tandem_kv_transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class PrefillCommand(_message.Message):
    __slots__ = ("hello", "prefill", "cancel", "beat", "generate")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    prefill: PrefillRequest
    cancel: Cancel
    beat: Beat
    generate: EngineRequest
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., prefill: _Optional[_Union[PrefillRequest, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., generate: _Optional[_Union[EngineRequest, _Mapping]] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("hello", "reserve", "generate", "cancel", "beat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    reserve: EngineRequest
    generate: EngineRequest
    cancel: Cancel
    beat: Beat
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., reserve: _Optional[_Union[EngineRequest, _Mapping]] = ..., generate: _Optional[_Union[EngineRequest, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "router_id", "incarnation")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    router_id: str
    incarnation: str
    def __init__(self, protocol_version: _Optional[int] = ..., router_id: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_token_ids", "output_token_ids", "sampling_params", "grammar", "cache_salt", "lora_name", "lora_digest", "bad_words", "thinking_budget")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    THINKING_BUDGET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _tandem_inference_pb2.SamplingParams
    grammar: str
    cache_salt: str
    lora_name: str
    lora_digest: str
    bad_words: _containers.RepeatedCompositeFieldContainer[BadWord]
    thinking_budget: ThinkingBudget
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_tandem_inference_pb2.SamplingParams, _Mapping]] = ..., grammar: _Optional[str] = ..., cache_salt: _Optional[str] = ..., lora_name: _Optional[str] = ..., lora_digest: _Optional[str] = ..., bad_words: _Optional[_Iterable[_Union[BadWord, _Mapping]]] = ..., thinking_budget: _Optional[_Union[ThinkingBudget, _Mapping]] = ...) -> None: ...

class ThinkingBudget(_message.Message):
    __slots__ = ("num_tokens", "end_token_id", "begin_token_ids", "has_begun", "may_repeat", "space_token_ids", "other_end_token_ids")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BEGIN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_BEGUN_FIELD_NUMBER: _ClassVar[int]
    MAY_REPEAT_FIELD_NUMBER: _ClassVar[int]
    SPACE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OTHER_END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    end_token_id: int
    begin_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_begun: bool
    may_repeat: bool
    space_token_ids: _containers.RepeatedScalarFieldContainer[int]
    other_end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_tokens: _Optional[int] = ..., end_token_id: _Optional[int] = ..., begin_token_ids: _Optional[_Iterable[int]] = ..., has_begun: _Optional[bool] = ..., may_repeat: _Optional[bool] = ..., space_token_ids: _Optional[_Iterable[int]] = ..., other_end_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class BadWord(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request", "grant")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    request: EngineRequest
    grant: _tandem_kv_transfer_pb2.Grant
    def __init__(self, request: _Optional[_Union[EngineRequest, _Mapping]] = ..., grant: _Optional[_Union[_tandem_kv_transfer_pb2.Grant, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class WorkerEvents(_message.Message):
    __slots__ = ("events", "load")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[WorkerEvent]
    load: WorkerLoad
    def __init__(self, events: _Optional[_Iterable[_Union[WorkerEvent, _Mapping]]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class WorkerEvent(_message.Message):
    __slots__ = ("request_id", "attempt", "granted", "busy", "tokens", "handed_over", "failed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    granted: _tandem_kv_transfer_pb2.Grant
    busy: Busy
    tokens: Tokens
    handed_over: HandedOver
    failed: Failed
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., granted: _Optional[_Union[_tandem_kv_transfer_pb2.Grant, _Mapping]] = ..., busy: _Optional[_Union[Busy, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., handed_over: _Optional[_Union[HandedOver, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ...) -> None: ...

class Busy(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("index", "token_ids", "finish_reason", "num_cached_tokens", "waited_ms", "logprobs", "prompt_logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _tandem_inference_pb2.FinishReason
    num_cached_tokens: int
    waited_ms: float
    logprobs: _containers.RepeatedCompositeFieldContainer[_tandem_inference_pb2.TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_tandem_inference_pb2.TokenLogprobs]
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_tandem_inference_pb2.FinishReason, str]] = ..., num_cached_tokens: _Optional[int] = ..., waited_ms: _Optional[float] = ..., logprobs: _Optional[_Iterable[_Union[_tandem_inference_pb2.TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_tandem_inference_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class HandedOver(_message.Message):
    __slots__ = ("stats",)
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: _tandem_inference_pb2.KVTransferStats
    def __init__(self, stats: _Optional[_Union[_tandem_inference_pb2.KVTransferStats, _Mapping]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("code", "message", "can_retry")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CAN_RETRY_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    can_retry: bool
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., can_retry: _Optional[bool] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_waiting_tokens", "blocks", "is_draining", "num_free_seqs", "is_stalled", "host_blocks")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_SEQS_FIELD_NUMBER: _ClassVar[int]
    IS_STALLED_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    blocks: BlockLedger
    is_draining: bool
    num_free_seqs: int
    is_stalled: bool
    host_blocks: HostLedger
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., blocks: _Optional[_Union[BlockLedger, _Mapping]] = ..., is_draining: _Optional[bool] = ..., num_free_seqs: _Optional[int] = ..., is_stalled: _Optional[bool] = ..., host_blocks: _Optional[_Union[HostLedger, _Mapping]] = ...) -> None: ...

class BlockLedger(_message.Message):
    __slots__ = ("num_blocks", "num_free", "num_cached", "num_sequence", "num_grant", "num_held")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NUM_GRANT_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_free: int
    num_cached: int
    num_sequence: int
    num_grant: int
    num_held: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_free: _Optional[int] = ..., num_cached: _Optional[int] = ..., num_sequence: _Optional[int] = ..., num_grant: _Optional[int] = ..., num_held: _Optional[int] = ...) -> None: ...

class HostLedger(_message.Message):
    __slots__ = ("num_blocks", "num_free", "num_kept", "num_saving")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_FIELD_NUMBER: _ClassVar[int]
    NUM_SAVING_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_free: int
    num_kept: int
    num_saving: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_free: _Optional[int] = ..., num_kept: _Optional[int] = ..., num_saving: _Optional[int] = ...) -> None: ...

class WorkerRecord(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "address", "pid", "compat_digest", "prefix_key", "is_draining", "load", "model", "protocol_version", "lease_ms", "can_generate", "keeps_no_prefixes", "num_state_blocks", "takes_grammars", "takes_cache_salts", "takes_allowed_token_ids", "takes_bad_words", "takes_thinking_budgets", "lora_digests", "leaving_loras", "exchanged_lora_names", "transport", "traits", "rival_address", "version")
    class LoraDigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    COMPAT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PREFIX_KEY_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    CAN_GENERATE_FIELD_NUMBER: _ClassVar[int]
    KEEPS_NO_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TAKES_GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    TAKES_CACHE_SALTS_FIELD_NUMBER: _ClassVar[int]
    TAKES_ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TAKES_BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    TAKES_THINKING_BUDGETS_FIELD_NUMBER: _ClassVar[int]
    LORA_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_LORAS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGED_LORA_NAMES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRAITS_FIELD_NUMBER: _ClassVar[int]
    RIVAL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: Role
    address: str
    pid: int
    compat_digest: str
    prefix_key: bytes
    is_draining: bool
    load: WorkerLoad
    model: _tandem_inference_pb2.GetModelInfoResponse
    protocol_version: int
    lease_ms: int
    can_generate: bool
    keeps_no_prefixes: bool
    num_state_blocks: int
    takes_grammars: bool
    takes_cache_salts: bool
    takes_allowed_token_ids: bool
    takes_bad_words: bool
    takes_thinking_budgets: bool
    lora_digests: _containers.ScalarMap[str, str]
    leaving_loras: _containers.RepeatedCompositeFieldContainer[LeavingLoRA]
    exchanged_lora_names: _containers.RepeatedScalarFieldContainer[str]
    transport: str
    traits: ModelTraits
    rival_address: str
    version: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., compat_digest: _Optional[str] = ..., prefix_key: _Optional[bytes] = ..., is_draining: _Optional[bool] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., model: _Optional[_Union[_tandem_inference_pb2.GetModelInfoResponse, _Mapping]] = ..., protocol_version: _Optional[int] = ..., lease_ms: _Optional[int] = ..., can_generate: _Optional[bool] = ..., keeps_no_prefixes: _Optional[bool] = ..., num_state_blocks: _Optional[int] = ..., takes_grammars: _Optional[bool] = ..., takes_cache_salts: _Optional[bool] = ..., takes_allowed_token_ids: _Optional[bool] = ..., takes_bad_words: _Optional[bool] = ..., takes_thinking_budgets: _Optional[bool] = ..., lora_digests: _Optional[_Mapping[str, str]] = ..., leaving_loras: _Optional[_Iterable[_Union[LeavingLoRA, _Mapping]]] = ..., exchanged_lora_names: _Optional[_Iterable[str]] = ..., transport: _Optional[str] = ..., traits: _Optional[_Union[ModelTraits, _Mapping]] = ..., rival_address: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class LeavingLoRA(_message.Message):
    __slots__ = ("lora_name", "lora_digest")
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    lora_name: str
    lora_digest: str
    def __init__(self, lora_name: _Optional[str] = ..., lora_digest: _Optional[str] = ...) -> None: ...

class ModelTraits(_message.Message):
    __slots__ = ("num_layers", "hidden_size", "tokens")
    class TokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    hidden_size: int
    tokens: _containers.ScalarMap[int, str]
    def __init__(self, num_layers: _Optional[int] = ..., hidden_size: _Optional[int] = ..., tokens: _Optional[_Mapping[int, str]] = ...) -> None: ...

class GetWorkerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("record", "uptime_s", "num_prefix_queries_tokens", "num_prefix_hits_tokens", "num_preemptions", "num_late_writes", "num_repairs", "num_expired_leases", "num_sessions", "num_prompt_tokens", "num_generation_tokens", "num_loaded_tokens")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_QUERIES_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HITS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_WRITES_FIELD_NUMBER: _ClassVar[int]
    NUM_REPAIRS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPIRED_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    record: WorkerRecord
    uptime_s: float
    num_prefix_queries_tokens: int
    num_prefix_hits_tokens: int
    num_preemptions: int
    num_late_writes: int
    num_repairs: int
    num_expired_leases: int
    num_sessions: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_loaded_tokens: int
    def __init__(self, record: _Optional[_Union[WorkerRecord, _Mapping]] = ..., uptime_s: _Optional[float] = ..., num_prefix_queries_tokens: _Optional[int] = ..., num_prefix_hits_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_late_writes: _Optional[int] = ..., num_repairs: _Optional[int] = ..., num_expired_leases: _Optional[int] = ..., num_sessions: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_generation_tokens: _Optional[int] = ..., num_loaded_tokens: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerAudit(_message.Message):
    __slots__ = ("worker_id", "address", "role", "blocks", "problems")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    role: Role
    blocks: BlockLedger
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., blocks: _Optional[_Union[BlockLedger, _Mapping]] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("worker_id", "num_steps", "timeout_ms", "with_trace")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    WITH_TRACE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    num_steps: int
    timeout_ms: int
    with_trace: bool
    def __init__(self, worker_id: _Optional[str] = ..., num_steps: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., with_trace: _Optional[bool] = ...) -> None: ...

class WorkerProfile(_message.Message):
    __slots__ = ("worker_id", "num_steps", "step_ms", "ops", "trace_gz")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    TRACE_GZ_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    num_steps: int
    step_ms: float
    ops: _containers.RepeatedCompositeFieldContainer[OpTime]
    trace_gz: bytes
    def __init__(self, worker_id: _Optional[str] = ..., num_steps: _Optional[int] = ..., step_ms: _Optional[float] = ..., ops: _Optional[_Iterable[_Union[OpTime, _Mapping]]] = ..., trace_gz: _Optional[bytes] = ...) -> None: ...

class OpTime(_message.Message):
    __slots__ = ("name", "num_calls", "host_ms", "device_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_CALLS_FIELD_NUMBER: _ClassVar[int]
    HOST_MS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_calls: int
    host_ms: float
    device_ms: float
    def __init__(self, name: _Optional[str] = ..., num_calls: _Optional[int] = ..., host_ms: _Optional[float] = ..., device_ms: _Optional[float] = ...) -> None: ...

class GetClusterStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("router_id", "num_queued_requests", "num_queued_tokens", "num_running_requests", "is_registry_reachable", "workers", "unreachable", "ejected", "of_another_kind", "apart", "not_connected", "unused", "version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    IS_REGISTRY_REACHABLE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    EJECTED_FIELD_NUMBER: _ClassVar[int]
    OF_ANOTHER_KIND_FIELD_NUMBER: _ClassVar[int]
    APART_FIELD_NUMBER: _ClassVar[int]
    NOT_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    UNUSED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    num_queued_requests: int
    num_queued_tokens: int
    num_running_requests: int
    is_registry_reachable: bool
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    unreachable: _containers.RepeatedScalarFieldContainer[str]
    ejected: _containers.RepeatedScalarFieldContainer[str]
    of_another_kind: _containers.RepeatedScalarFieldContainer[str]
    apart: _containers.RepeatedCompositeFieldContainer[WorkerPair]
    not_connected: _containers.RepeatedScalarFieldContainer[str]
    unused: _containers.RepeatedScalarFieldContainer[str]
    version: str
    def __init__(self, router_id: _Optional[str] = ..., num_queued_requests: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., num_running_requests: _Optional[int] = ..., is_registry_reachable: _Optional[bool] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., unreachable: _Optional[_Iterable[str]] = ..., ejected: _Optional[_Iterable[str]] = ..., of_another_kind: _Optional[_Iterable[str]] = ..., apart: _Optional[_Iterable[_Union[WorkerPair, _Mapping]]] = ..., not_connected: _Optional[_Iterable[str]] = ..., unused: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ...) -> None: ...

class WorkerPair(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ...) -> None: ...

class ClusterAudit(_message.Message):
    __slots__ = ("workers", "unreachable", "router_id", "problems")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerAudit]
    unreachable: _containers.RepeatedScalarFieldContainer[str]
    router_id: str
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerAudit, _Mapping]]] = ..., unreachable: _Optional[_Iterable[str]] = ..., router_id: _Optional[str] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...
