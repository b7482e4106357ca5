"""The partitions, barriers and shared memory of a Gluon kernel for Hopper, on a CPU.

Each partition is a thread, of which one runs at a time. Where they meet, which of them goes on is drawn at random: a
program ends, or a deadlock shows. What is asynchronous happens as early or as late as it may: TMA spoils a buffer at
once, and fills it at some time before its barrier completes; a product reads shared memory when it is issued, or not
before it is waited for. Both want a fence after an ordinary store, and after the copies of a cp.async, which spoils a
buffer at once and fills it at some time before the arrival behind it. A warpgroup is one thread, so races between its
own warps are not seen.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

SECONDS = 60  # that a program may take


class Value(Tensor):
    """A tensor or a number in registers, which `+=` does not change for other partitions."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]
    __iadd__, __isub__ = Tensor.__add__, Tensor.__sub__


class Shared:
    """A buffer in shared memory, or a view of one."""

    def __init__(self, machine: Machine, data: Tensor) -> None:
        self.machine, self.data, self.dtype, self.shape = machine, data, data.dtype, tuple(data.shape)

    def index(self, i: Any) -> Shared:
        return Shared(self.machine, self.data[int(i)])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.machine, self.data.view(shape))

    def permute(self, dims: Sequence[int]) -> Shared:
        return Shared(self.machine, self.data.permute(dims))

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.machine, self.data.narrow(dim, start, length))

    def load(self, layout: object) -> Tensor:
        return self.data.clone()

    def store(self, values: Tensor) -> None:
        self.machine.unfenced.setdefault(threading.current_thread(), set()).add(self._address())
        self.data.copy_(values)

    def by_async_proxy(self) -> Tensor:
        assert not any(self._address() in stored for stored in self.machine.unfenced.values()), "a fence is missing"
        assert self.data.data_ptr() not in self.machine.gathered, "a fence is missing after a gather"
        return self.data

    def _address(self) -> int:
        return self.data.untyped_storage().data_ptr()


class Barrier:
    """An mbarrier. `phases` are those that are complete."""

    count = pending = bytes = phases = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, arrivals: int, more_bytes: int) -> None:
        assert self.pending >= arrivals, "more arrivals than a phase has"
        self.pending, self.bytes = self.pending - arrivals, self.bytes + more_bytes
        if self.pending == self.bytes == 0:
            self.phases, self.pending = self.phases + 1, self.count


class Barriers(list[Barrier]):
    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        return self[int(i)]


class Product:
    """A product that may not have been made yet."""

    def __init__(self, *operands: Any) -> None:
        self.operands, self.value = operands, None

    def __call__(self) -> Tensor:
        if self.value is None:
            a, b, acc = self.operands
            a = a.by_async_proxy() if isinstance(a, Shared) else a
            self.value = a.float() @ b.by_async_proxy().float() + (acc() if isinstance(acc, Product) else acc)
        return self.value


class Machine:
    """Runs the partitions of one program at a time, in an order that `seed` decides."""

    def __init__(self, seed: int) -> None:
        self.random, self.changed = random.Random(seed), threading.Condition()
        self.waiting: dict[threading.Thread, Callable[[], bool]] = {}  # until when
        self.copies: list[Callable[[], None]] = []  # under way
        self.unfenced: dict[threading.Thread, set[int]] = {}
        self.gathered: set[int] = set()  # the buffers that cp.async wrote, and no one has fenced
        self.gathers: dict[threading.Thread, list[Callable[[], None]]] = {}  # that no arrival waits for yet
        self.products: dict[threading.Thread, list[Product]] = {}  # in flight, in order
        self.turn: threading.Thread | None = None
        self.failure: BaseException | None = None

    def run(self, partitions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: object) -> None:
        threads = [threading.Thread(target=self._run, args=x, name=x[0].__name__, daemon=True) for x in partitions]
        self.waiting = dict.fromkeys(threads, lambda: True)
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), f"{thread.name} does not end"
        if self.failure is not None:
            raise self.failure
        assert not self.copies, "what was loaded is not waited for"
        assert not self.gathers, "what was gathered is not waited for"

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others overtake, until it is this partition's turn again and `ready()`."""
        me = threading.current_thread()
        if me in self.waiting:
            self.waiting[me] = ready
            self._pass_on()
            self._await_turn()

    def fence(self) -> None:
        self.unfenced.pop(threading.current_thread(), None)
        self.gathered.clear()

    def load_tile(self, descriptor: Any, at: Sequence[Any], barrier: Barrier, to: Shared, pred: Any = True) -> None:
        """Copy a tile by TMA. What lies beyond the tensor is 0."""
        if not pred:
            return
        to.by_async_proxy().fill_(float("nan"))
        tile = tuple(
            slice(int(x), int(x) + n if x >= 0 else 0) for x, n in zip(at, descriptor.block_shape, strict=True)
        )
        part = descriptor.base[tile]

        def copy() -> None:
            to.data.zero_()
            to.data[tuple(map(slice, part.shape))] = part
            barrier.arrive(0, -to.data.nbytes)

        self.copies.append(copy)
        self.pause()

    def gather(self, to: Shared, rows: Tensor) -> None:
        """Copy by cp.async. What is copied is read at once, as global memory does not change."""
        to.data.fill_(float("nan"))

        def copy() -> None:
            to.data.copy_(rows)
            self.gathered.add(to.data.data_ptr())

        self.gathers.setdefault(threading.current_thread(), []).append(copy)
        self.pause()

    def arrive_after_gathers(self, barrier: Barrier, arrivals: int) -> None:
        """Let the threads of a warpgroup arrive when all of its copies so far are there."""
        copies = self.gathers.pop(threading.current_thread(), [])

        def arrive() -> None:
            for copy in copies:
                copy()
            barrier.arrive(arrivals, 0)

        self.copies.append(arrive)
        self.pause()

    def multiply(self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
        self.pause()
        product = Product(a, b, acc if use_acc else 0.0)
        self.products.setdefault(threading.current_thread(), []).append(product)
        if not is_async or self.random.random() < 0.5:
            product()
        return product

    def wait_for_products(self, in_flight: int, deps: Sequence[Any]) -> Any:
        """Wait for all products of this partition but the last ones."""
        self.pause()
        products = self.products.get(threading.current_thread(), [])
        while len(products) > in_flight:
            products.pop(0)()
        assert not any(x is y for x in deps for y in products), "a product is taken before it is there"
        done = [x().as_subclass(Value) if isinstance(x, Product) else x for x in deps]
        return done if len(done) > 1 else done[0]

    def _run(self, partition: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            self._await_turn()
            partition(*args)
            del self.waiting[threading.current_thread()]
            self._pass_on()
        except BaseException as failure:
            self._fail(failure)

    def _await_turn(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn is threading.current_thread() or self.failure is not None)
        if self.failure is not None:
            raise SystemExit

    def _pass_on(self) -> None:
        while self.waiting:
            able = [thread for thread, ready in self.waiting.items() if ready()]
            if not able and not self.copies:
                return self._fail(AssertionError(f"deadlock of {', '.join(x.name for x in self.waiting)}"))
            at = self.random.randrange(len(able) + len(self.copies))
            if at < len(able):
                with self.changed:
                    self.turn = able[at]
                    return self.changed.notify_all()
            self.copies.pop(at - len(able))()
        return None

    def _fail(self, failure: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or failure
            self.changed.notify_all()
