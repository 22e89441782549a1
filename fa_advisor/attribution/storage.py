"""One storage as the attribution knows it, and one attention call that storages may belong to."""

from __future__ import annotations

from enum import IntFlag

from fa_advisor.probes.events import Phase, Scope, SdpaFacts
from fa_advisor.records import Category

Shape = tuple[int, ...]

# How many pointwise steps back a mask's ancestry is kept; beyond it the chain is cut.
MAX_ANCESTRY = 12


class Origin(IntFlag):
    """What a storage's values derive from, as far as structure tells."""

    NONE = 0
    PARAMETER = 1  # parameters only, through casts and pointwise ops
    POSITION = 2  # aranges only
    TRIANGULAR = 4  # tril, triu, or a comparison of positions: a causal mask
    RANDOM = 8  # drawn by a random generator


class Storage:
    """A storage's facts; `category()` decides what its bytes are once the stream has ended."""

    __slots__ = (
        "address",
        "block",
        "call",
        "dtype",
        "earlier",
        "escaped",
        "fqn",
        "generation",
        "kv",
        "label",
        "nbytes",
        "numel",
        "op",
        "origin",
        "parents",
        "phase",
        "random_p",
        "read_in_backward",
        "role",
        "saved_by",
        "scope",
        "shape",
        "sid",
        "source",
        "unseen",
    )

    def __init__(
        self,
        sid: int,
        shape: Shape,
        dtype: str,
        nbytes: int,
        op: str,
        scope: Scope,
        phase: Phase,
        source: tuple[str, int] | None,
    ) -> None:
        self.sid = sid
        self.shape = shape
        self.dtype = dtype
        self.nbytes = nbytes
        self.op = op
        self.scope = scope
        self.phase = phase
        self.source = source
        numel = 1
        for extent in shape:
            numel *= extent
        self.numel = numel
        self.address = 0  # on the GPU, where the allocator's trace is recorded
        self.block = -1  # the allocator's address, -1 where it holds none
        self.label: Category | None = None  # what a probe knows for sure
        self.fqn: str | None = None  # of the label's owner
        self.origin = 0  # Origin bits; a plain int, because IntFlag's operators are slow
        self.parents: tuple[Storage, ...] = ()
        self.generation = 0
        self.call: Call | None = None
        self.role: Category | None = None
        self.random_p = 0.0
        self.read_in_backward = False
        self.escaped = False
        self.kv = False
        self.saved_by: Call | None = None
        self.unseen = False  # the allocator knows of it, and nothing else does
        self.earlier = False  # unseen, and there before the recording began

    def category(self) -> Category:
        """Label first, then attention's structure, then how the storage was used."""
        if self.label is not None:
            return self.label
        if self.call is not None and self.role is not None and self.call.find().confirmed:
            # A product in backward looks like S until it meets P: it was dP.
            in_backward = self.role == "attention_score" and self.phase is Phase.BACKWARD
            return "attention_grad" if in_backward else self.role
        if self.phase in (Phase.FORWARD, Phase.RECOMPUTE):
            kept = self.read_in_backward or self.escaped
            return "activation" if kept else "temporary"
        return "temporary"

    def attention_call(self) -> Call | None:
        """The confirmed attention call that this storage's bytes belong to."""
        if self.label is None and self.call is not None and self.role is not None:
            call = self.call.find()
            return call if call.confirmed else None
        return None


class Call:
    """A product of two activations that is attention if its softmax meets V; else just a product.

    Calls that turn out to be one (scores added to each other, dP meeting P) are merged.
    """

    __slots__ = (
        "batch",
        "causal",
        "confirmed",
        "dropout_p",
        "dtype",
        "expressible",
        "fused",
        "has_mask",
        "head_dim",
        "heads",
        "kv_heads",
        "m",
        "masks",
        "merged_into",
        "n",
        "phase",
        "saved_bytes",
        "scope",
        "sdpa",
        "softmaxed",
        "source",
    )

    def __init__(
        self,
        m: int,
        n: int,
        head_dim: int,
        dtype: str,
        scope: Scope,
        phase: Phase,
        source: tuple[str, int] | None,
        sdpa: SdpaFacts | None,
    ) -> None:
        self.merged_into: Call | None = None
        self.confirmed = False
        self.softmaxed = False
        self.fused = ""
        self.m = m
        self.n = n
        self.batch = 1
        self.heads = 1
        self.kv_heads = 0
        self.head_dim = head_dim
        self.dtype = dtype
        self.causal = False
        self.expressible = True  # scale, masks and biases alone stand between S and its softmax
        self.has_mask = False
        self.dropout_p = 0.0
        self.scope = scope
        self.phase = phase
        self.source = source
        self.sdpa = sdpa
        self.masks: list[Storage] = []
        self.saved_bytes = 0

    def find(self) -> Call:
        """The call that this one was merged into, at the end of the chain."""
        call = self
        while call.merged_into is not None:
            call = call.merged_into
        return call
