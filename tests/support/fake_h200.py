"""A made-up H200: without a GPU, PyTorch traces and Inductor generates code for it, of which nothing can run.

For scripts in a process of their own: `install` patches PyTorch and Triton for good.
"""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any

import torch

PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=141 << 30,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20,
    gcnArchName="",
)


class _Driver:
    class utils:
        @staticmethod
        def get_device_properties(_: int) -> dict[str, int]:
            return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: Any = None) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def is_active(self) -> bool:
        return True


def install() -> None:
    import torch._functorch.aot_autograd
    import torch._inductor.fx_passes.joint_graph
    import torch._inductor.fx_passes.post_grad
    import torch._subclasses.fake_tensor
    import triton
    from torch._dynamo import device_interface

    triton.runtime.driver.set_active(_Driver())
    torch._subclasses.fake_tensor.init_gpu_context = lambda device: None
    state = torch.zeros(16, dtype=torch.uint8)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "_lazy_init": lambda: None,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "NVIDIA H200",
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "get_rng_state": lambda device=None: state,
        "set_rng_state": lambda *args: None,
    }.items():
        setattr(torch.cuda, name, value)
    torch.cuda.device.__enter__ = lambda self: None
    torch.cuda.device.__exit__ = lambda self, *args: False
    torch.version.cuda = "13.0"
    torch._functorch.aot_autograd.preserve_rng_state = contextlib.nullcontext
    for module in (torch._inductor.fx_passes.joint_graph, torch._inductor.fx_passes.post_grad):
        module.lazy_init = lambda *args, **kwargs: None  # traces patterns on the GPU
    interface = device_interface.CudaInterface
    interface.is_available = staticmethod(lambda: True)
    interface.get_device_properties = staticmethod(lambda device=None: PROPERTIES)
    interface.get_compute_capability = staticmethod(lambda device=None: 90)
    interface.Worker.current_device = staticmethod(lambda: 0)
    interface.Worker.get_device_properties = staticmethod(lambda device=None: PROPERTIES)


class _Generated(BaseException):
    """Carries the code out before Inductor loads it; no error, so nothing is done about it."""


def generated_code(fn: Any, inputs: list[Any], *, compiler: Any = None, **options: Any) -> str:
    """Return the code that Inductor generates for `fn` with these options.

    Inputs are tensors, given by shape and dtype, or sizes. A size that is a string has no value when this is compiled.
    `compiler` takes a graph and its inputs; without it Inductor compiles them.
    """
    from torch._dynamo.source import ConstantSource
    from torch._inductor import compile_fx, config
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    generate = GraphLowering.codegen

    def stop(self: GraphLowering) -> None:
        found = generate(self)[0]
        raise _Generated(getattr(found, "value", found))

    GraphLowering.codegen = stop
    compile_all = compile_fx.compile_fx

    def compile_until_generated(*args: Any, **kwargs: Any) -> Any:
        try:
            return compile_all(*args, **kwargs)
        except BaseException as raised:
            error: BaseException | None = raised
            while error is not None and not isinstance(error, _Generated):
                error = error.__cause__ or error.__context__
            if error is None:
                raise
            return str(error)

    compile_fx.compile_fx = compile_until_generated
    static = {"fx_graph_cache": False, "compile_threads": 1, "triton.autotune_at_compile_time": False}
    sizes = ShapeEnv()

    @functools.cache
    def size(n: Any) -> Any:
        if not isinstance(n, str):
            return n
        symbol = sizes.create_symbol(3, ConstantSource(n), DimDynamic.DYNAMIC)
        return sizes.create_symintnode(symbol, hint=3)

    def example(x: Any) -> Any:
        return torch.empty([*map(size, x[0])], dtype=x[1], device="cuda") if isinstance(x, tuple) else size(x)

    try:
        with FakeTensorMode(shape_env=sizes), config.patch({**static, **options}), torch.no_grad():
            examples = [*map(example, inputs)]
            return (compiler or compile_until_generated)(make_fx(fn)(*examples), examples)
    finally:
        GraphLowering.codegen = generate
        compile_fx.compile_fx = compile_all
