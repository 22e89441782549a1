"""The ledger: every allocation and free of a step, and who owns what is alive at its peak.

Only the step with the highest peak is kept, so memory stays bounded however long the run is.
"""

from __future__ import annotations

from fa_advisor.attribution.allocator import CachingAllocator, rounded
from fa_advisor.attribution.attention import AttentionMatcher
from fa_advisor.attribution.reductions import REDUCTIONS, Operand, scratch_bytes
from fa_advisor.attribution.steps import Claim, Entry, Held, Kept, Run, StepLog
from fa_advisor.attribution.storage import Origin, Shape, Storage
from fa_advisor.attribution.workspaces import Workspaces
from fa_advisor.probes.events import GATHERS, NOWHERE, Code, Event, Kind, Op, Phase, Scope
from fa_advisor.records import Category

# A stream without step boundaries (inference in a loop) is cut after this many entries.
LOG_LIMIT = 400_000

# Softmax's backward makes grad * output before its kernel runs (ATen/native/cuda/SoftMax.cu).
WITH_A_PRODUCT = frozenset(("_softmax_backward_data",))
_OF_STORAGES = frozenset((Code.EXTERNAL, Code.RESIZE, Code.LABEL, Code.BLOCK))


class Ledger:
    """Consumes events in order.

    `modelled`: sizes come from a model of the caching allocator (and `workspaces`, what the
    first matrix product of a thread takes for cuBLAS); else each request is only rounded to 512.
    `closes`: too long a step is cut in two; else only `take_step` says where one ends.
    `warmup`: a training's first step, in which the optimizer makes its state, counts only where no
    other comes.
    """

    def __init__(
        self,
        *,
        modelled: bool,
        total_memory_bytes: int | None = None,
        workspaces: Workspaces | None = None,
        closes: bool = True,
        warmup: bool = False,
    ) -> None:
        self._closes = closes
        self._allocator = CachingAllocator(total_memory_bytes) if modelled else None
        self._workspaces = workspaces
        self._taken: set[str] = set()  # of the workspaces
        self._matcher = AttentionMatcher()
        self._storages: dict[int, Storage] = {}
        self._addresses: dict[int, int] = {}  # of storages that no event has made known yet
        self._allocated = 0
        self._next_pseudo_sid = -1
        self._inherits: Storage | None = None
        self._waiting: list[Event] = []
        self._step = StepLog([], 0)
        self._kept = Kept(warmup=warmup)

    def feed(self, events: list[Event]) -> None:
        """Take in events. The last operator waits: what dies right after it belongs to it."""
        events = self._waiting + events
        last = len(events) - 1
        while last > 0 and events[last][0] != Code.OP:
            last -= 1
        self._waiting = events[last:]
        self._consume(events, last)

    def skim(self, events: list[Event]) -> None:
        """Take in a whole step of which only what outlives it matters."""
        self._drain()
        dying = {event[1] for event in events if event[0] == 1}  # Code.FREE
        known, kept, lasting = set(self._storages), set[int](), []
        for event in events:
            code = event[0]
            if code == 0:  # Code.OP
                for sid, _, _, nbytes in event[6]:
                    if nbytes >= 0 and sid not in dying:
                        break
                else:
                    if not kept:
                        continue
                    if not any(sid in kept for sid, _ in event[5]):  # who reads it matters, too
                        continue
                made = [sid for sid, _, _, nbytes in event[6] if nbytes >= 0]
                known.update(made)
                if event[3] is Phase.FORWARD:
                    kept.update(sid for sid in made if sid not in dying)
            elif code == 1:
                if event[1] not in known:
                    continue
            elif code in _OF_STORAGES and event[1] in dying and event[1] not in known:
                continue
            lasting.append(event)
        self._consume(lasting, len(lasting))

    def _drain(self) -> None:
        events, self._waiting = self._waiting, []
        self._consume(events, len(events))

    def _consume(self, events: list[Event], count: int) -> None:
        run, free = self._op, self._free
        for index in range(count):
            event = events[index]
            code = event[0]
            if code == 0:  # Code.OP and Code.FREE are nearly all of them
                if event[3] is Phase.BACKWARD and event[1].name == "add":
                    self._inherits = self._summed_into(event, events, index)
                run(*event[1:])
            elif code == 1:
                free(event[1])
            elif code == Code.LABEL:
                self._label(*event[1:])
            elif code == Code.EXTERNAL:
                sid, shape, dtype, nbytes = event[1:]
                storage = Storage(sid, shape, dtype, nbytes, "", NOWHERE, Phase.FORWARD, None)
                storage.label = "input"
                storage.address = self._addresses.pop(sid, 0)
                self._storages[sid] = storage
                self._allocate(storage, Phase.FORWARD)
            elif code == Code.RESIZE:
                self._resize(event[1], event[2])
            elif code == Code.SDPA:
                self._matcher.enter_sdpa(*event[1:])
            elif code == Code.STEP:
                self._close_step(event[1], event[2])
            elif code == Code.FORWARD_END:
                self._keep_kv_cache()
            elif code == Code.BLOCK:
                self._locate(*event[1:])
            if self._closes and len(self._step.entries) > LOG_LIMIT:
                self._close_step()

    def _locate(self, sid: int, address: int, number: int) -> None:
        self._step.claims.append(Claim(number, address, sid))
        known = self._storages.get(sid)
        if known is not None:
            known.address = address
        else:
            self._addresses[sid] = address

    def storage(self, sid: int) -> Storage | None:
        """A storage that is alive now."""
        self._drain()
        return self._storages.get(sid)

    @property
    def best(self) -> StepLog | None:
        """The step with the highest peak so far; of equals the one that ended first."""
        return self._kept.best

    def end_step(self, kind: str = "", about: object = None) -> None:
        """Close the step; keep it if its peak is the highest so far."""
        self._drain()
        self._close_step(kind, about)

    @property
    def entries(self) -> int:
        """How long the step's log is so far."""
        return len(self._step.entries)

    def take_step(self) -> StepLog:
        """Close the step and hand it over, whatever its peak; what is alive stays alive."""
        self._drain()
        step = self._step
        step.calls, self._matcher.calls = self._matcher.calls, []
        self._begin_step()
        return step

    def _close_step(self, kind: str = "", about: object = None) -> None:
        step = self._step
        step.kind, step.about = kind, about
        step.calls, self._matcher.calls = self._matcher.calls, []
        self._kept.offer(step)
        self._begin_step()

    def begin_step(self) -> None:
        """Forget what was seen since the last step ended; what is alive stays alive."""
        self._drain()
        self._matcher.calls = []
        self._begin_step()

    def start_measuring(self) -> None:
        """Forget the steps so far (warm-up); what is alive stays alive."""
        self._drain()
        self._kept.forget()
        self._matcher.calls = []
        self._begin_step()

    def _begin_step(self) -> None:
        baseline = [
            Held(s, self._block_size(s), s.nbytes) for s in self._storages.values() if s.block >= 0
        ]
        self._step = StepLog(baseline, self._allocated, peak_bytes=self._allocated)
        if self._allocator is not None:
            self._allocator.peak_reserved = self._allocator.reserved
            self._step.peak_reserved_bytes = self._allocator.reserved

    # -- events -----------------------------------------------------------------------------

    def _summed_into(self, event: Event, events: list[Event], index: int) -> Storage | None:
        """The gradient that autograd would have added to in place, had nobody watched.

        Where two gradients meet, the engine adds into the one that nobody else holds; under a
        dispatch mode it makes a third tensor and drops both. Seen here as a sum whose operand dies
        before the next operator runs.
        """
        inputs, outputs = event[5], event[6]
        if self._allocator is None or len(inputs) != 2 or len(outputs) != 1:
            return None
        sizes = {shape for _, shape in inputs} | {outputs[0][1]}
        if len(sizes) != 1 or outputs[0][3] < 0:
            return None
        dying = set()
        for later in events[index + 1 : index + 8]:
            if later[0] != Code.FREE:
                break
            dying.add(later[1])
        for sid, _ in inputs:
            storage = self._storages.get(sid)
            if sid in dying and storage is not None and storage.nbytes == outputs[0][3]:
                return storage
        return None

    def _op(
        self,
        op: Op,
        scope: Scope,
        phase: Phase,
        source: tuple[str, int] | None,
        inputs: tuple[tuple[int, Shape], ...],
        outputs: tuple[tuple[int, Shape, str, int], ...],
        extra: object,
        number: int = 0,
    ) -> None:
        storages = self._storages
        if number:
            self._step.runs[number] = Run(op, scope, phase, source)
        if op.kind is Kind.MATMUL and self._workspaces is not None:
            self._take_workspaces(self._workspaces, phase, op)
        seen = []
        for sid, shape in inputs:
            storage = storages.get(sid)
            if storage is None:
                continue
            seen.append((storage, shape))
            if phase == Phase.BACKWARD:
                if not storage.read_in_backward and storage.phase != Phase.BACKWARD:
                    storage.read_in_backward = True
                    if storage.saved_by is not None:
                        storage.saved_by.find().saved_bytes += storage.nbytes
            elif storage.scope is not scope:
                storage.escaped = True
        made = []
        for sid, shape, dtype, nbytes in outputs:
            if nbytes >= 0:
                storage = Storage(sid, shape, dtype, nbytes, op.name, scope, phase, source)
                storages[sid] = storage
                storage.address = self._addresses.pop(sid, 0)
                if op.kind is Kind.COMMUNICATION or _is_bucket(op, scope, shape):
                    storage.label = "communication"
                self._allocate(storage, phase)
            else:
                known = storages.get(sid)
                if known is None:
                    continue
                storage = known
            made.append((storage, shape))
        inner = []
        if self._workspaces is not None and seen and made:
            if op.name in WITH_A_PRODUCT:
                inner = [self._take_product(seen[0][0], made[0][0])]
            elif op.name in REDUCTIONS and isinstance(extra, tuple):
                inner = self._take_parts(self._workspaces, Operand(*extra), made[0][0])
        if phase is not Phase.OPTIMIZER:
            self._matcher.see(op, scope, phase, source, seen, made, extra)
        for each in inner:
            each.call, each.role = made[0][0].call, made[0][0].role
            self._release(each)

    def _take_product(self, grad: Storage, output: Storage) -> Storage:
        """The memory that an operator of `WITH_A_PRODUCT` takes for as long as it runs."""
        nbytes = output.numel * (grad.nbytes // max(1, grad.numel))
        return self._take_inside(output, output.shape, grad.dtype, nbytes)

    def _take_parts(self, on: Workspaces, operand: Operand, output: Storage) -> list[Storage]:
        """The memory that a sum takes for as long as it runs."""
        sizes = scratch_bytes(operand, output.dtype, on.machine)
        return [self._take_inside(output, (nbytes,), "uint8", nbytes) for nbytes in sizes]

    def _take_inside(self, output: Storage, shape: Shape, dtype: str, nbytes: int) -> Storage:
        sid, self._next_pseudo_sid = self._next_pseudo_sid, self._next_pseudo_sid - 1
        inner = Storage(
            sid, shape, dtype, nbytes, output.op, output.scope, output.phase, output.source
        )
        self._allocate(inner, output.phase)
        return inner

    def _free(self, sid: int) -> None:
        storage = self._storages.pop(sid, None)
        if storage is not None:
            self._release(storage)

    def _label(self, sid: int, label: Category | str, fqn: str, triangular: bool = False) -> None:
        storage = self._storages.get(sid)
        if storage is None:
            return
        if label == "host":
            storage.label = "optimizer_state"
            self._release(storage)
            return
        if label == "input" and storage.scope.type:
            return  # one module made it for another
        # A tied or re-labelled storage keeps its strongest claim: parameters stay parameters.
        if storage.label is None or storage.label == "input":
            storage.label = label  # type: ignore[assignment]
            storage.fqn = fqn
        if label == "parameter":
            storage.origin |= Origin.PARAMETER.value
        if triangular:
            storage.origin |= Origin.TRIANGULAR.value

    def _resize(self, sid: int, nbytes: int) -> None:
        storage = self._storages.get(sid)
        if storage is None:
            return
        phase = self._step.entries[-1].phase if self._step.entries else Phase.FORWARD
        self._release(storage)
        storage.nbytes = nbytes
        if nbytes:
            self._allocate(storage, phase)

    def _keep_kv_cache(self) -> None:
        for storage in self._storages.values():
            if storage.kv and storage.label is None:
                storage.label = "kv_cache"
                storage.fqn = storage.scope.fqn

    # -- bytes ------------------------------------------------------------------------------

    def _take_workspaces(self, sizes: Workspaces, phase: Phase, op: Op) -> None:
        """cuBLAS keeps a workspace for each thread's handle, cuBLASLt (products with a bias) one
        more for the forward's."""
        backward = phase in (Phase.BACKWARD, Phase.RECOMPUTE)
        self._take_workspace("backward" if backward else "forward", sizes.cublas, op)
        if op.name == "addmm" and not backward:
            self._take_workspace("forward, cuBLASLt", sizes.cublaslt, op)

    def _take_workspace(self, owner: str, size: int, op: Op) -> None:
        if owner in self._taken:
            return
        self._taken.add(owner)
        sid, self._next_pseudo_sid = self._next_pseudo_sid, self._next_pseudo_sid - 1
        workspace = Storage(sid, (size,), "uint8", size, op.name, NOWHERE, Phase.FORWARD, None)
        workspace.label = "workspace"
        self._storages[sid] = workspace
        self._allocate(workspace, Phase.FORWARD)

    def _block_size(self, storage: Storage) -> int:
        if self._allocator is not None:
            return self._allocator.size_of(storage.block)
        return rounded(storage.nbytes)

    def _allocate(self, storage: Storage, phase: Phase) -> None:
        if storage.nbytes == 0:
            return
        giver, self._inherits = self._inherits, None
        if giver is not None and giver.block >= 0:
            self._hand_over(giver, storage, phase)
            return
        storage.block = self._allocator.allocate(storage.nbytes) if self._allocator else 0
        block = self._block_size(storage)
        self._allocated += block
        step = self._step
        step.entries.append(Entry(storage, block, storage.nbytes, phase))
        if self._allocated > step.peak_bytes:
            step.peak_bytes = self._allocated
            step.peak_at = len(step.entries)
        if self._allocator is not None:
            step.peak_reserved_bytes = self._allocator.peak_reserved

    def _hand_over(self, old: Storage, new: Storage, phase: Phase) -> None:
        """The same block under a new storage."""
        size = self._block_size(old)
        new.block, old.block = old.block, -1
        self._step.entries.append(Entry(old, -size, -old.nbytes, phase))
        self._step.entries.append(Entry(new, size, new.nbytes, phase))

    def _release(self, storage: Storage) -> None:
        if storage.block < 0:
            return
        block = self._block_size(storage)
        phase = self._step.entries[-1].phase if self._step.entries else Phase.FORWARD
        if self._allocator is not None:
            self._allocator.release(storage.block)
        storage.block = -1
        self._allocated -= block
        self._step.entries.append(Entry(storage, -block, -storage.nbytes, phase))


def _is_bucket(op: Op, scope: Scope, shape: Shape) -> bool:
    """A bucket of `GATHERS`, made between the modules."""
    return scope.type == GATHERS and op.name == "empty" and len(shape) == 1
