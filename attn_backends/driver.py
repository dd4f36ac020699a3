"""Launching compiled CUDA kernels straight through the driver, at the least cost to the host.

What takes time in other launchers is looking at arguments: each is inspected, converted and packed
again for every launch. A ``Launch`` lays the arguments of one kernel out in memory once, in the
form that ``cuLaunchKernelEx`` reads, and then rewrites the stream and the few arguments that
change. Threads never write to the same memory: each launch takes a block of it from a list and puts
it back. Where even that costs too much, ``filled`` gives a block that nothing changes any more.

Nothing here runs before the first launch, and importing this module touches no driver.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

#: Sizes of arguments, by the letters of ``struct``: addresses, integers and floats; ``M`` is a
#: tensor map, given as its bytes.
SIZES = {"Q": 8, "q": 8, "d": 8, "I": 4, "i": 4, "f": 4, "M": 128}
_MOST_ALIGNED = 64

# CUlaunchConfig: grid, block and shared memory in 7 words, then stream, attributes, their number.
_CONFIG = struct.Struct("<7I4x3Q")
_STREAM_AT = 32
# CUlaunchAttribute: an identifier and 64 bytes of value; this one is programmatic serialization.
_ATTRIBUTES = ctypes.create_string_buffer(struct.pack("<i4xi60x", 6, 1), 72)
_NO_CONTEXT = 201
_PROMOTE_128_BYTES = 2
_MOST_POOLED = 64


@cache
def _library() -> Any:
    """The driver's library, or None."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@cache
def _launch_function() -> Any:
    """``cuLaunchKernelEx``, or None where the driver lacks it (before CUDA 11.8)."""
    return getattr(_library(), "cuLaunchKernelEx", None)


#: The current device, and the current stream of a device, of torch: functions without wrappers.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def available() -> bool:
    """Whether the driver can be called from here."""
    return _launch_function() is not None


@cache
def version() -> int:
    """CUDA version of the driver, as 13000 for 13.0; 0 without one."""
    found = ctypes.c_int()
    library = _library()
    return 0 if library is None or library.cuDriverGetVersion(ctypes.byref(found)) else found.value


def offsets(formats: str) -> list[int]:
    """Byte offset of each argument; every one is aligned to its own size, up to 64."""
    found, at = [], 0
    for letter in formats:
        size = SIZES[letter]
        at += -at % min(size, _MOST_ALIGNED)
        found.append(at)
        at += size
    return found


def tensor_map(
    address: int, dtype: int, shape: Sequence[int], strides: Sequence[int], box: Sequence[int],
    swizzle: int,
) -> bytes:  # fmt: skip
    """Encode how the bulk copies of Hopper see a tensor; what lies outside of it reads as 0.

    Args:
        address: Of the first element, a multiple of 16.
        dtype: As the driver numbers them.
        shape: Elements per dimension, the innermost last.
        strides: Bytes from one to the next, for all dimensions but the innermost.
        box: Elements per dimension that one copy brings.
        swizzle: As the driver numbers them.

    Raises:
        RuntimeError: The driver refused; the message has its words.
    """
    rank = len(shape)
    # The driver wants a place of 64 bytes' alignment.
    room = ctypes.create_string_buffer(2 * _MOST_ALIGNED + SIZES["M"])
    at = ctypes.addressof(room)
    at += -at % _MOST_ALIGNED
    long, short = _array(ctypes.c_uint64, rank), _array(ctypes.c_uint32, rank)
    code = _library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), dtype, ctypes.c_uint32(rank), ctypes.c_void_p(address),
        long(*reversed(shape)), long(*reversed(strides), 0), short(*reversed(box)),
        short(*[1] * rank), 0, swizzle, _PROMOTE_128_BYTES, 0,
    )  # fmt: skip
    if code:
        raise RuntimeError(f"the CUDA driver refused a tensor map: {_words(code)}")
    return ctypes.string_at(at, SIZES["M"])


def parameters(function: int) -> list[tuple[int, int]] | None:
    """Offset and size of each parameter of a loaded kernel; None if the driver cannot tell."""
    ask = getattr(_library(), "cuFuncGetParamInfo", None)  # since CUDA 12.4
    if ask is None:
        return None
    found: list[tuple[int, int]] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    handle = ctypes.c_void_p(function)
    while not ask(handle, ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)):
        found.append((offset.value, size.value))
    return found


def _pattern(formats: str) -> str:
    """``formats`` with the padding that alignment puts between arguments."""
    text, at = "", 0
    for letter, offset in zip(formats, offsets(formats)):
        code = f"{SIZES[letter]}s" if letter == "M" else letter
        text += f"{offset - at}x{code}" if offset > at else code
        at = offset + SIZES[letter]
    return text


@cache
def _packing(formats: str, changing: int) -> tuple[list[int], struct.Struct, Any]:
    """Offsets of arguments, how to write them all, and how to write a stream and the first."""
    whole = struct.Struct("<" + _pattern(formats))
    return offsets(formats), whole, struct.Struct("<3Q" + _pattern(formats[:changing])).pack_into


@cache
def _array(kind: Any, length: int) -> Any:
    """The type of an array; ctypes forgets types that no array has, and is slow to make them."""
    return kind * length


#: Memory for config, arguments and the table of their addresses, and references to config and
#: table as the driver takes them.
Block = tuple[Any, Any, Any]


def _block(size: int, starts: list[int]) -> Block:
    table_at = _CONFIG.size + size + -size % 8
    memory = _array(ctypes.c_char, table_at + 8 * len(starts))()
    first = ctypes.addressof(memory) + _CONFIG.size
    struct.pack_into(f"<{len(starts)}Q", memory, table_at, *[first + start for start in starts])
    return memory, ctypes.byref(memory), ctypes.byref(memory, table_at)


@cache
def _pool(formats: str) -> list[Block]:
    """Blocks that launches of this form have left: making one takes longer than a launch."""
    return []


class Launch:
    """One kernel with its grid and arguments, ready to be launched again and again.

    Args:
        function: Handle of the loaded kernel (CUfunction or CUkernel).
        grid: Blocks per dimension.
        threads: Per block.
        formats: One letter of ``SIZES`` per argument.
        values: The arguments.
        changing: How many of the first arguments each launch passes anew.
        shared: Bytes of dynamic shared memory.
        pdl: Launch so that the kernel may start before the one ahead of it has ended; the kernel
            must then wait by itself.
        owner: Kept alive with the launch, since its end would unload the kernel.
    """

    __slots__ = ("_attributes", "_call", "_config", "_count", "_function", "_idle", "_offsets",
                 "_owner", "_pack", "_pool", "_values", "_whole")  # fmt: skip

    def __init__(
        self, function: int, grid: tuple[int, int, int], threads: int, formats: str,
        values: tuple[Any, ...], changing: int, *, shared: int = 0, pdl: bool = False,
        owner: Any = None,
    ) -> None:  # fmt: skip
        assert len(formats) == len(values)
        self._attributes = ctypes.addressof(_ATTRIBUTES) if pdl else 0
        self._count = int(pdl)
        self._config = (*grid, threads, 1, 1, shared, 0, self._attributes, self._count)
        self._function = ctypes.c_void_p(function)
        self._values = values
        self._offsets, self._whole, self._pack = _packing(formats, changing)
        self._call = _launch_function()
        self._owner = owner
        self._idle: list[Block] = []
        self._pool = _pool(formats)

    def _memory(self) -> Block:
        """A block of config and arguments, used before if there is one of this form."""
        try:
            block = self._pool.pop()
        except IndexError:
            block = _block(self._whole.size, self._offsets)
        memory = block[0]
        _CONFIG.pack_into(memory, 0, *self._config)
        self._whole.pack_into(memory, _CONFIG.size, *self._values)
        return block

    def __del__(self, most: int = _MOST_POOLED) -> None:  # globals may be gone by then
        if len(self._pool) < most:
            self._pool.extend(self._idle)

    def __call__(self, stream: int, *changing: Any) -> None:
        """Launch on a stream of the current device.

        Args:
            stream: Handle of the stream.
            changing: The first arguments.

        Raises:
            RuntimeError: The driver refused; the message has its words.
        """
        try:  # no check before: another thread may come between
            block = self._idle.pop()
        except IndexError:
            block = self._memory()
        memory, config, table = block
        self._pack(memory, _STREAM_AT, stream, self._attributes, self._count, *changing)
        code = self._call(config, self._function, table, None)
        if code:
            retry(code, (config, self._function, table, None))
        self._idle.append(block)

    def filled(self, stream: int, *changing: Any) -> Filled:
        """The same launch on a stream with the first arguments, to be repeated without writing."""
        block = self._memory()
        self._pack(block[0], _STREAM_AT, stream, self._attributes, self._count, *changing)
        return Filled((block[1], self._function, block[2], None), self)

    def anew(self, grid: tuple[int, int, int], stream: int, values: tuple[Any, ...]) -> None:
        """Launch with another grid and all arguments; for launches that are used in no other way.

        Args:
            grid: Blocks per dimension.
            stream: Handle of the stream.
            values: All arguments.

        Raises:
            RuntimeError: The driver refused; the message has its words.
        """
        try:  # no check before: another thread may come between
            block = self._idle.pop()
        except IndexError:
            block = self._memory()
        memory, config, table = block
        _CONFIG.pack_into(
            memory, 0, *grid, *self._config[3:7], stream, self._attributes, self._count
        )
        self._whole.pack_into(memory, _CONFIG.size, *values)
        code = self._call(config, self._function, table, None)
        if code:
            retry(code, (config, self._function, table, None))
        self._idle.append(block)


class Filled:
    """A launch whose memory is written: threads may share it.

    Args:
        args: What the driver is called with; holds the memory.
        launch: Whose launch it is; kept alive with it.
    """

    __slots__ = ("_launch", "args", "call")

    def __init__(self, args: tuple[Any, ...], launch: Launch) -> None:
        self.args, self.call, self._launch = args, launch._call, launch

    def __call__(self) -> None:
        """Launch; the device must be current, and the stream one of its own."""
        code = self.call(*self.args)
        if code:
            retry(code, self.args)


def retry(code: int, args: tuple[Any, ...]) -> None:
    """Launch again in a new thread, whose first launch finds no context; else raise.

    Args:
        code: What the driver said.
        args: What it was called with.

    Raises:
        RuntimeError: The driver refused; the message has its words.
    """
    if code == _NO_CONTEXT:
        bind_context()
        code = _launch_function()(*args)
    if code:
        raise RuntimeError(f"the CUDA driver refused a launch: {_words(code)}")


def bind_context() -> None:
    """Give this thread the context of torch's current device, as its first CUDA call would."""
    library = _library()
    context = ctypes.c_void_p()
    code = library.cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device())
    code = code or library.cuCtxSetCurrent(context)
    if code:
        raise RuntimeError(f"the CUDA driver gave no context: {_words(code)}")


def _words(code: int) -> str:
    text = ctypes.c_char_p()
    _library().cuGetErrorString(code, ctypes.byref(text))
    return f"{(text.value or b'unknown error').decode()} ({code})"


__all__ = [
    "SIZES",
    "Filled",
    "Launch",
    "available",
    "bind_context",
    "current_device",
    "current_stream",
    "offsets",
    "parameters",
    "tensor_map",
    "version",
]
