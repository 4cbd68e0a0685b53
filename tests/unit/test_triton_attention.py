"""The Triton backend compared with attention in float64 and with plain torch, over odd shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import LENS, Case
from gpu_kinds import GPU_KINDS
from triton_device import DEVICE, ROUNDS_AS_A_GPU

from engine.attention import StepLayout
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.attention.triton_invariant import InvariantTritonAttention
from engine.kernels.gpu import pieces
from engine.kernels.gpu.decode import MAX_PIECES, DecodeConfig, num_pieces, paged_decode, partial_size
from engine.kernels.gpu.gpu_kind import H200, GpuKind, gpu_kind
from engine.kernels.gpu.pieces import PiecesConfig
from engine.kernels.gpu.prefill import list_tiles

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SMALL_PIECES = DecodeConfig(block_n=16, min_piece=16, num_warps=4, num_stages=2)
HEAD_DIMS = [8, 64, 80, 96, 128, 256, 512]


def case_of(
    lens: list[tuple[int, int]],
    num_groups: int = 3,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    num_kv_heads: int = 2,
    kv_dtype: torch.dtype | None = None,
) -> Case:
    return Case(
        lens, num_heads=num_kv_heads * num_groups, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
        dtype=dtype, kv_dtype=kv_dtype,
    )  # fmt: skip


Backend = TritonAttention | InvariantTritonAttention


def backend_of(case: Case, kind: GpuKind | None = None, make: type[Backend] = TritonAttention) -> Backend:
    return make(
        num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, block_size=case.block_size,
        dtype=str(case.q.dtype).removeprefix("torch."), kv_dtype=str(case.kv.dtype).removeprefix("torch."),
        device=DEVICE, kind=kind or gpu_kind(DEVICE),
    )  # fmt: skip


def written_pool(case: Case) -> torch.Tensor:
    """The pool after plain torch has written the step's keys and values to it."""
    plain = TorchAttention(
        num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, block_size=case.block_size,
        device="cpu",
    )  # fmt: skip
    kv = case.kv.clone()
    plain.write_kv(kv, case.k, case.v, plain.prepare(case.layout))
    return kv


def attend(
    case: Case,
    window: int = 0,
    soft_cap: float = 0.0,
    scale: float | None = None,
    sinks_N: torch.Tensor | None = None,
    kind: GpuKind | None = None,
    make: type[Backend] = TritonAttention,
) -> torch.Tensor:
    backend = backend_of(case, kind, make)
    kv = written_pool(case).to(DEVICE)
    sinks_N = None if sinks_N is None else sinks_N.to(DEVICE)
    return backend.attend(
        case.q.to(DEVICE), kv, backend.prepare(case.layout), case.scores(window, soft_cap, scale), sinks_N
    ).cpu()


def assert_close(case: Case, window: int = 0, soft_cap: float = 0.0, scale: float | None = None) -> None:
    tolerance = TOLERANCES[case.q.dtype]
    if (soft_cap or scale) and ROUNDS_AS_A_GPU:
        tolerance = max(tolerance, 3e-5)  # approximated powers of 2 and division, times the cap; large scores
    actual, expected = attend(case, window, soft_cap, scale).double(), case.expected(window, soft_cap, scale)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# -- against float64 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 5, 16, *(pytest.param(window, marks=pytest.mark.slow) for window in (1, 1000))])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
def test_against_float64(lens: list[tuple[int, int]], window: int) -> None:
    assert_close(case_of(lens, num_kv_heads=1), window)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("num_groups", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_all_head_shapes(num_groups: int, head_dim: int) -> None:
    lens = [(70, 1), (15, 1), (16, 1), (0, 1), (0, 19), (30, 35)]
    assert_close(case_of(lens, num_groups, head_dim, torch.bfloat16, num_kv_heads=1 if num_groups > 1 else 2))


@pytest.mark.parametrize("num_groups", [17, 64])
def test_more_query_heads_than_a_tile_of_the_tensor_cores_has_rows(num_groups: int) -> None:
    assert_close(case_of([(20, 1), (7, 6)], num_groups, num_kv_heads=1))


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is of a kind of its own")
@pytest.mark.parametrize(("head_dim", "num_groups"), [(96, 8), (256, 64), (512, 32)])
def test_with_the_sizes_for_other_gpus(head_dim: int, num_groups: int) -> None:
    case = case_of([(260, 1), (15, 1), (0, 4), (30, 9)], num_groups, head_dim, torch.float16, num_kv_heads=1)
    actual, expected = attend(case, kind=GPU_KINDS[8, 9]).double(), case.expected(0)
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("block_size", [1, 8, 256])
def test_all_types_and_block_sizes(dtype: torch.dtype, block_size: int) -> None:
    lens = [(64, 1), (255, 1), (0, 1), (63, 2), (10, 30)] if block_size > 1 else [(40, 1), (0, 1), (20, 5)]
    assert_close(case_of(lens, dtype=dtype, block_size=block_size, num_kv_heads=1))


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 64), (torch.bfloat16, 80), (torch.float16, 64)])
@pytest.mark.parametrize("window", [0, 9])
def test_a_pool_of_8_bit_floats(window: int, dtype: torch.dtype, head_dim: int) -> None:
    """The keys and values are 8-bit floats themselves, so only the arithmetic between them rounds."""
    lens = [(140, 1), (15, 1), (0, 1), (0, 19), (30, 70)]
    assert_close(case_of(lens, 4, head_dim, dtype, num_kv_heads=1, kv_dtype=torch.float8_e4m3fn), window)


@pytest.mark.parametrize("window", [0, 9])
def test_soft_cap(window: int) -> None:
    case = case_of([(70, 1), (0, 1), (20, 19)], num_kv_heads=1)
    case.q *= 40  # scores of several dozens, which the cap bends
    assert not torch.allclose(attend(case, window).double(), case.expected(window, 20.0), rtol=1e-2, atol=1e-2)
    assert_close(case, window, 20.0)


@pytest.mark.parametrize("soft_cap", [0.0, 20.0])
def test_another_scale(soft_cap: float) -> None:
    case = case_of([(70, 1), (0, 1), (20, 19)], num_kv_heads=1)
    case.q *= 5
    assert_close(case, 0, soft_cap, scale=0.9)


@pytest.mark.parametrize("lens", [[(70, 1), (0, 1), (20, 19)], [(300, 1), (12, 1)]], ids=["one piece", "pieces"])
@pytest.mark.parametrize("window", [0, 9])
def test_sinks(window: int, lens: list[tuple[int, int]]) -> None:
    case = case_of(lens, num_kv_heads=2)
    actual, expected = attend(case, window, sinks_N=case.sinks()), case.expected(window, sinks_N=case.sinks())
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_scores_of_any_size_stay_finite() -> None:
    case = case_of([(40, 1), (0, 20)], dtype=torch.bfloat16)
    case.q *= 300
    for window, soft_cap in ((0, 0.0), (7, 0.0), (0, 50.0)):
        assert attend(case, window, soft_cap).isfinite().all()


@pytest.mark.parametrize("window", [0, 20])
def test_whole_tiles_and_windows_beyond_one_tile(window: int) -> None:
    """Contexts of several tiles of 64 keys, read from cached blocks, by chunks that begin and end within tiles."""
    assert_close(case_of([(64, 1), (127, 64), (200, 130), (0, 129)], 4, dtype=torch.bfloat16, num_kv_heads=1), window)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_head_reads_nothing_of_the_next_one() -> None:
    """The head's size is padded: what lies beyond would be multiplied by zero, and 0 * NaN is NaN."""
    case = case_of([(31, 1), (0, 32)], 1, 80)
    case.k[:, 1], case.kv[:, 0, 1] = float("nan"), float("nan")
    out, expected = (x.view(-1, 2, 80) for x in (attend(case).double(), case.expected(0)))
    torch.testing.assert_close(out[:, 0], expected[:, 0], rtol=1e-5, atol=1e-5)
    assert out[:, 1].isnan().all()


def test_agrees_with_plain_torch() -> None:
    case = case_of(LENS["mixed"])
    plain = TorchAttention(num_heads=6, num_kv_heads=2, head_dim=64, block_size=16, device="cpu")
    expected = plain.attend(case.q, written_pool(case), plain.prepare(case.layout), case.scores(11))
    torch.testing.assert_close(attend(case, 11), expected, rtol=1e-5, atol=1e-5)


# -- split contexts -------------------------------------------------------------------------------------------------


def decode(
    case: Case, window: int, max_context_len: int, config: DecodeConfig, sinks_N: torch.Tensor | None = None
) -> torch.Tensor:
    plan = backend_of(case).prepare(case.layout)
    q = case.q.to(DEVICE)
    out = torch.full_like(q, float("nan"))
    size = partial_size(len(q), case.num_heads, case.head_dim, max_context_len, config)
    paged_decode(
        q, written_pool(case).to(DEVICE), plan.block_tables, plan.context_lens, out,
        torch.full((size,), float("nan"), device=DEVICE), max_context_len=max_context_len, scores=case.scores(window),
        sinks_N=None if sinks_N is None else sinks_N.to(DEVICE), config=config,
    )  # fmt: skip
    return out.flatten(1).cpu()


@pytest.mark.parametrize("window", [0, 17, 40, 1000])
def test_split_contexts_are_put_together(window: int) -> None:
    case = case_of([(150, 1), (15, 1), (16, 1), (0, 1), (599, 1), (512, 1)], dtype=torch.float32, num_kv_heads=1)
    assert num_pieces(600, 0, SMALL_PIECES) == MAX_PIECES  # the longest is cut into fewer, larger ones
    actual = decode(case, window, 600, SMALL_PIECES)
    torch.testing.assert_close(actual.double(), case.expected(window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("before", [100, 11], ids=["pieces", "one piece"])
def test_a_sequence_gets_the_same_bits_in_any_batch_and_from_any_graph(before: int, has_sinks: bool) -> None:
    alone = case_of([(before, 1)], num_kv_heads=1)
    sinks_N = alone.sinks() if has_sinks else None
    tokens = (alone.q, *alone.history[-1])
    expected = decode(alone, 0, before + 1, SMALL_PIECES, sinks_N)
    q_of_all = torch.zeros(before + 1, *alone.q.shape[1:])
    q_of_all[before] = tokens[0][0]
    among = Case(
        [(300, 1), (5, 1), (before, 1)], num_heads=3, num_kv_heads=1, head_dim=64, block_size=16,
        last=(q_of_all, tokens[1], tokens[2]),
    )  # fmt: skip
    for max_context_len in (301, 400, 100_000):
        assert torch.equal(decode(among, 0, max_context_len, SMALL_PIECES, sinks_N)[-1:], expected)


def test_an_empty_row_of_a_graph_attends_to_nothing() -> None:
    case = case_of([(70, 1), (3, 1)])
    case.layout.context_lens[1] = 0
    for config in (SMALL_PIECES, DecodeConfig.of(gpu_kind(DEVICE), 64, 4)):
        for sinks_N in (None, case.sinks()):
            out = decode(case, 0, 71, config, sinks_N)
            assert (out[1] == 0).all()
            assert out[0].isfinite().all()


@pytest.mark.parametrize(
    ("max_context_len", "window", "expected"),
    [(0, 0, 1), (1, 0, 1), (256, 0, 1), (257, 0, 2), (8192, 0, 32), (131_072, 0, 32), (131_072, 512, 2), (100, 512, 1)],
)
def test_how_many_pieces(max_context_len: int, window: int, expected: int) -> None:
    assert num_pieces(max_context_len, window, DecodeConfig.of(H200, 128, 2)) == expected


# -- chunks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 50])
def test_a_token_gets_the_same_bits_however_its_prompt_is_cut(window: int) -> None:
    whole = case_of([(0, 150)], dtype=torch.bfloat16, num_kv_heads=1)
    tokens, expected = (whole.q, whole.k, whole.v), attend(whole, window)
    for before, new in ((0, 64), (63, 2), (64, 64), (100, 50), (7, 90)):
        chunk = Case(
            [(5, 3), (before, new)], num_heads=3, num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.bfloat16,
            last=tokens,
        )  # fmt: skip
        assert torch.equal(attend(chunk, window)[3:], expected[before : before + new]), (before, new)


# -- the same bits in prompts and while decoding --------------------------------------------------------------------


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 64)


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("window", [0, 50, 100])
@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype"),
    [
        (64, torch.bfloat16, None), (80, torch.float32, None), (128, torch.float16, None),
        (128, torch.bfloat16, torch.float8_e4m3fn), (256, torch.bfloat16, None),
    ],
)  # fmt: skip
def test_pieces_against_float64(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None, window: int) -> None:
    lens = [(300, 1), (63, 1), (64, 1), (0, 1), (0, 19), (30, 135)]
    case = case_of(lens, 4, head_dim, dtype, num_kv_heads=1, kv_dtype=kv_dtype)
    tolerance = TOLERANCES[dtype]
    actual, expected = attend(case, window, make=InvariantTritonAttention).double(), case.expected(window)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("window", [0, 70])
def test_pieces_with_sinks_and_a_soft_cap(window: int) -> None:
    case = case_of([(150, 1), (0, 1), (20, 119)], num_kv_heads=2)
    case.q *= 10
    actual = attend(case, window, 20.0, sinks_N=case.sinks(), make=InvariantTritonAttention)
    expected = case.expected(window, 20.0, sinks_N=case.sinks())
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, *(pytest.param(window, marks=pytest.mark.slow) for window in (50, 130))])
def test_a_token_gets_the_same_bits_in_a_prompt_and_while_its_sequence_decodes(window: int, dtype: torch.dtype) -> None:
    whole = case_of([(0, 300)], dtype=dtype, num_kv_heads=1)
    tokens, expected = (whole.q, whole.k, whole.v), attend(whole, window, make=InvariantTritonAttention)
    for before, new in ((0, 1), (63, 1), (64, 1), (299, 1), (290, 4), (7, 200)):
        step = Case(
            [(70, 1), (before, new)], num_heads=3, num_kv_heads=1, head_dim=64, block_size=16, dtype=dtype, last=tokens
        )
        assert step.layout.num_decodes == 1 + (new == 1)
        actual = attend(step, window, make=InvariantTritonAttention)[1:]
        assert torch.equal(actual, expected[before : before + new]), (before, new)


def test_pieces_lie_where_no_tile_of_keys_is_cut() -> None:
    for kind in GPU_KINDS.values():
        for head_dim in HEAD_DIMS:
            for itemsize in (2, 4):
                assert pieces.PIECE % PiecesConfig.of(kind, head_dim, itemsize, 4).block_n == 0
    assert [pieces.num_pieces(n) for n in (0, 1, 1024, 1025, 8192)] == [1, 1, 1, 2, 8]


def test_tiles_cover_every_token_once_longest_context_first() -> None:
    query_lens, context_lens = np.array([1, 42, 43, 1, 100]), np.array([9, 42, 300, 2000, 100])
    tiles = list_tiles(query_lens, context_lens, 1, 42)
    covered = [(seq, i) for seq, first in tiles.tolist() for i in range(first, min(first + 42, query_lens[seq]))]
    assert sorted(covered) == [(seq, i) for seq in range(1, 5) for i in range(query_lens[seq])]
    assert len(tiles) == 1 + 2 + 1 + 3
    assert tiles[0].tolist() == [3, 0]


# -- plans ----------------------------------------------------------------------------------------------------------


def test_a_plan_is_one_buffer_of_aligned_arrays() -> None:
    case = case_of(LENS["mixed"])
    plan = backend_of(case).prepare(case.layout)
    for part in (plan.slot_mapping, plan.context_lens, plan.query_starts, plan.block_tables, plan.prefill_tiles):
        assert (part.data_ptr() - plan.buffer.data_ptr()) % 16 == 0  # in bytes
        assert part.untyped_storage().data_ptr() == plan.buffer.untyped_storage().data_ptr()
    np.testing.assert_array_equal(plan.slot_mapping.cpu(), case.layout.slot_mapping)
    np.testing.assert_array_equal(plan.context_lens.cpu(), case.layout.context_lens)
    np.testing.assert_array_equal(plan.block_tables.cpu(), case.layout.block_tables)
    np.testing.assert_array_equal(plan.query_starts.cpu(), [0, *np.cumsum(case.layout.query_lens)])


@pytest.mark.parametrize("make", [TritonAttention, InvariantTritonAttention])
def test_a_reserved_plan_serves_any_step_that_fits(make: type[Backend]) -> None:
    """As when a CUDA graph replays it: the same tensors and grid, with other numbers in them."""
    cases = [case_of([(40, 1), (3, 1), (16, 1)]), case_of([(299, 1)]), case_of([(0, 1), (15, 1)])]
    backend = backend_of(cases[0], make=make)
    plan = backend.reserve_decode_plan(3, 320)
    address = plan.buffer.data_ptr()
    for case in cases:
        backend.refill(plan, case.layout)
        q = torch.zeros(3, 6, 64, device=DEVICE)
        q[: len(case.q)] = case.q
        out = backend.attend(q, written_pool(case).to(DEVICE), plan, case.scores()).cpu()
        torch.testing.assert_close(out[: len(case.q)].double(), case.expected(0), rtol=1e-5, atol=1e-5)
        assert (out[len(case.q) :] == 0).all()
        assert (plan.slot_mapping[len(case.q) :] == -1).all()
    assert plan.buffer.data_ptr() == address


def test_reserved_plans_share_their_scratch() -> None:
    """There is a plan for each size of step and length of context: with a scratch each, they would take over a
    gigabyte."""
    backend = backend_of(case_of([(5, 1)]))
    sizes = [(8, 256), (4, 256), (1, 512), (8, 1024), (8, 8192), (1, 8192), (7, 2048)]
    plans = [backend.reserve_decode_plan(*size) for size in sizes]
    config = DecodeConfig.of(gpu_kind(DEVICE), 64, 4)
    needed = [partial_size(num_seqs, 6, 64, length, config) for num_seqs, length in sizes]
    assert all(len(plan.scratch) >= size for plan, size in zip(plans, needed, strict=True))
    kept = {plan.scratch.data_ptr(): len(plan.scratch) for plan in plans}
    assert sum(kept.values()) <= 2 * max(needed)
    step = backend.prepare(case_of([(700, 1), (40, 1), (0, 9)]).layout)
    assert step.scratch.data_ptr() == plans[-1].scratch.data_ptr(), "steps that are not recorded use it, too"


def test_scratch_that_is_kept_is_enough_for_every_step() -> None:
    """So the pool can take the rest of the memory."""
    backend = backend_of(case_of([(5, 1)]))
    backend.keep_scratch(8, 1 << 17)
    address = backend._scratch.data_ptr()
    for lens in ([(300, 1), (40, 1)], [(3, 1)] * 8, [(200, 1), (0, 5)]):
        assert backend.prepare(case_of(lens).layout).scratch.data_ptr() == address


@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU has CUDA graphs")
def test_a_cuda_graph_replays_other_steps() -> None:
    cases = [case_of([(299, 1), (3, 1), (16, 1)]), case_of([(40, 1)]), case_of([(0, 1), (275, 1)])]
    backend = backend_of(cases[0])
    plan = backend.reserve_decode_plan(3, 320)
    q, kv = torch.zeros(3, 6, 64, device=DEVICE), torch.zeros_like(cases[0].kv, device=DEVICE)
    backend.attend(q, kv, plan, cases[0].scores())  # compiles, which cannot be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend(q, kv, plan, cases[0].scores())
    for case in cases:
        backend.refill(plan, case.layout)
        q[: len(case.q)] = case.q.to(DEVICE)
        kv.copy_(written_pool(case))
        graph.replay()
        actual = out[: len(case.q)].cpu().double()
        torch.testing.assert_close(actual, case.expected(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lens", [[(0, 1)] * 4, [(320, 1)], [(0, 1), (0, 2)]], ids=["many", "long", "prefill"])
def test_a_reserved_plan_refuses_what_does_not_fit(lens: list[tuple[int, int]]) -> None:
    case = case_of(lens)
    backend = backend_of(case)
    with pytest.raises(ValueError, match="a plan for 3 sequences that decode up to 320 tokens has no room"):
        backend.refill(backend.reserve_decode_plan(3, 320), case.layout)


def test_no_decodes_and_no_prefills_are_both_steps() -> None:
    case = case_of([(0, 5)])
    assert backend_of(case).prepare(case.layout).num_decodes == 0
    layout: StepLayout = case_of([(4, 1)]).layout
    assert len(backend_of(case).prepare(layout).prefill_tiles) == 0
