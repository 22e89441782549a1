"""What both forwards share: barriers, whose turn it is, the tiles that others see, masks."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


@gluon.jit
def barriers(STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Ready and empty of Q, a consumer each, and of K and of V, a stage of the ring each."""
    q_ready = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_ready.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=CONSUMERS)
        mbarrier.init(v_ready.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=CONSUMERS)
    fence_async_shared()  # The copy engine counts on the barriers as well.
    return q_ready, q_empty, k_ready, k_empty, v_ready, v_empty


@gluon.jit
def _unless(s, offset, limit, PASSES: gl.constexpr):
    """Logits, or -inf where an offset passes ("lt", "gt") the limit.

    As one step: compared by itself, a tile gives more predicates than there are registers for.
    """
    CODE: gl.constexpr = (
        "{ .reg .pred p; setp." + PASSES + ".s32 p, $2, $3; selp.f32 $0, 0fFF800000, $1, p; }"
    )
    return gl.inline_asm_elementwise(
        CODE, "=f,f,r,r", [s, offset, limit], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def cut(s, limit, PASSES: gl.constexpr):
    """Logits, or -inf in the columns that pass ("gt", "lt") their row's limit.

    A thread's columns are 8 n + 2 c + (0, 1) with c its own: so n is a constant to compare with.
    """
    BM: gl.constexpr = s.shape[0]
    BN: gl.constexpr = s.shape[1]
    S: gl.constexpr = s.type.layout
    s = s.reshape([BM, BN // 8, 8])
    PARTS: gl.constexpr = s.type.layout
    eights = gl.arange(0, BN // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, PARTS))) * 8
    among = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, PARTS)))
    limit = gl.convert_layout(limit, gl.SliceLayout(1, gl.SliceLayout(2, PARTS)))
    left = limit[:, None, None] - among[None, None, :]
    s = _unless(s, eights[None, :, None], left, PASSES)
    return gl.convert_layout(s.reshape([BM, BN]), S)


@gluon.jit
def row_maximum(s, BM: gl.constexpr, BN: gl.constexpr, ROW: gl.constexpr):
    """The largest of each row, in a tree: in a chain each would wait for the one before."""
    most = gl.max(s.reshape([BM, BN // 32, 4, 4, 2]), axis=1)
    most = gl.max(gl.max(most, axis=1), axis=2)
    return gl.convert_layout(gl.max(most, axis=1), ROW)


@gluon.jit
def lane_sums(p):
    """Sums over a row's columns 8 n + 2 c + (0, 1), for each c: those that one thread holds."""
    BM: gl.constexpr = p.shape[0]
    BN: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([BM, BN // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def prepare_exceeds():
    """Before the first `exceeds` of a kernel, for all its warps: the register of its answer."""
    gl.inline_asm_elementwise(
        ".reg .u32 fa_exceeds; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def exceeds(x, most, CID: gl.constexpr):
    """Whether any number of a consumer is larger, as a scalar: 0 or 1. A thread holds two numbers.

    A barrier with a vote, named 13, 14 or 15: a maximum over the warps would take two barriers and
    a dozen shuffles.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p, q; setp.gt.f32 p, $2, $4; setp.gt.or.f32 p, $3, $5, p;"
        " barrier.cta.red.or.pred q, $6, 128, p; selp.u32 fa_exceeds, 1, 0, q;"
        " mov.u32 $0, 0; mov.u32 $1, 0; }",
        "=r,=r,f,f,f,f,r,r", [x, most, 13 + CID], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip
    return gl.inline_asm_elementwise(
        "mov.u32 $0, fa_exceeds;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def take_turn(CID: gl.constexpr):
    """Wait until it is a consumer's turn to give the tensor cores its products.

    Named barriers 10, 11, 12: Gluon's own have lower numbers.
    """
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.u32 $0, 0;", "=r,r", [10 + CID],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def end_turn(CID: gl.constexpr, CONSUMERS: gl.constexpr):
    """It is the next consumer's turn."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.u32 $0, 0;", "=r,r", [10 + (CID + 1) % CONSUMERS],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pass_by(
    high, low, slot, phase, buffers, some, TURNS: gl.constexpr, STAGES: gl.constexpr,
    BN: gl.constexpr, CID: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Let the tiles of keys in [low, high) go, which only other consumers' rows see.

    some: whether this one's rows see any of the piece. TURNS: whether consumers take turns, of a
    piece all as many: one less than it has tiles.
    """
    k_ready, k_empty, v_ready, v_empty = buffers[6], buffers[7], buffers[8], buffers[9]
    for tile in range(low, high, BN):
        if TURNS:  # noqa: SIM102 (a constexpr alone is left out when compiled)
            if some | (tile > low):
                take_turn(CID)
                end_turn(CID, CONSUMERS)
        # Not before they have come: a barrier must not be told of the next round in this one.
        mbarrier.wait(k_ready.index(slot), phase)
        mbarrier.arrive(k_empty.index(slot), count=1)
        mbarrier.wait(v_ready.index(slot), phase)
        mbarrier.arrive(v_empty.index(slot), count=1)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    return slot, phase
