"""Run the CUDA merge on a CPU: the same sources, with their hardware section in plain C++.

Each thread of a block is a coroutine; a barrier gives control back, and a block whose threads do
not all reach a barrier is an error. One block runs at a time. Loaded by ``test_emulated.py``.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch._C._dynamo.guards import _empty_strided_cpu

from attn_backends import driver, layouts
from attn_backends.merge import cuda_merge, dispatch, many, nvrtc, pair

COMPILER = shutil.which("g++") or shutil.which("c++")

PRELUDE = r"""
#include <ucontext.h>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
struct Dim { unsigned x; };
static Dim threadIdx, blockIdx, gridDim;
static float __int_as_float(int i) { float f; memcpy(&f, &i, 4); return f; }
static float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static int __ffs(unsigned u) { return __builtin_ffs(u); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }

static ucontext_t home, threads[THREADS];
static char* stacks;
static bool finished[THREADS];
static std::function<void()> body;
static int failure = 0;
static void __syncthreads() { swapcontext(&threads[threadIdx.x], &home); }
static void thread_main() {
  body();
  finished[threadIdx.x] = true;
  swapcontext(&threads[threadIdx.x], &home);
}
static void run(long grid, std::function<void()> kernel) {
  const size_t size = 1 << 16;
  body = kernel;
  gridDim.x = grid;
  if (!stacks) stacks = (char*)malloc(size * THREADS);
  for (long block = 0; block < grid; ++block) {
    blockIdx.x = block;
    for (int i = 0; i < THREADS; ++i) {
      finished[i] = false;
      getcontext(&threads[i]);
      threads[i].uc_stack.ss_sp = stacks + size * i;
      threads[i].uc_stack.ss_size = size;
      threads[i].uc_link = &home;
      makecontext(&threads[i], thread_main, 0);
    }
    for (int done = 0; done < THREADS;) {
      done = 0;
      for (int i = 0; i < THREADS; ++i) {
        threadIdx.x = i;
        swapcontext(&home, &threads[i]);
        done += finished[i];
      }
      if (done && done < THREADS) { failure = 1; return; }  // some wait at a barrier
    }
  }
}
"""

HARDWARE = r"""
static const i64* bounds;  // begin and end of what may be read; null: anything
static i64 num_bounds;
static std::vector<i64> reads;  // of the last run
static bool may_read(const void* p, i64 size) {
  reads.push_back((i64)p);
  for (i64 i = 0; i < num_bounds; ++i)
    if (bounds[2 * i] <= (i64)p && (i64)p + size <= bounds[2 * i + 1]) return true;
  if (bounds) failure = 3;
  return !bounds;
}
static Vec load_vec(const char* p) {
  if ((uintptr_t)p % 16) failure = 2;
  Vec v = {0, 0, 0, 0};
  if (may_read(p, 16)) memcpy(&v, p, 16);
  return v;
}
static float load_lse(const float* p) { return may_read(p, 4) ? *p : 0.f; }
static float peek_lse(const float* p) { return load_lse(p); }
static u32 vote(bool yes) { return (u32)yes << threadIdx.x % 32; }  // each thread by itself
static bool speaks_for_warp() { return true; }
static void let_next_come() {}
static void wait_for_previous() {}
static volatile char fetched;  // read, so that a stray address is found
static void fetch(const void* p) {
  if (may_read(p, 1)) fetched = *(const char*)p;
}
static void fetch_bulk(const void* p, u32 bytes) {
  for (u32 i = 0; i < bytes; i += 16) fetch((const char*)p + i);
}
static float reciprocal(float x) { return 1.f / x; }
static float half_to_float(u16 bits) { _Float16 h; memcpy(&h, &bits, 2); return (float)h; }
static u32 round_half(float f) {
#if OUT_TYPE == 1
  _Float16 h = (_Float16)f;
  u16 bits;
  memcpy(&bits, &h, 2);
  return bits;
#else
  u32 u = __float_as_uint(f);
  return f != f ? 0x7fffu : (u + 0x7fffu + (u >> 16 & 1)) >> 16;
#endif
}
#if OUT_TYPE == 3
static u32 round_fp8(float f) {  // e4m3fn, to nearest even, saturated
  const u32 sign = __float_as_uint(f) >> 24 & 0x80;
  const float size = fminf(fabsf(f), 448.f);
  if (f != f) return 0x7f;
  if (size == 0.f) return sign;
  const int exponent = ilogbf(size) < -6 ? -6 : ilogbf(size);
  const u32 steps = (u32)nearbyintf(ldexpf(size, 3 - exponent));  // 16 carries into the exponent
  return sign | ((u32)(exponent + 6) << 3) + steps;
}
static u32 pack_fp8x4(const float* f) {
  return round_fp8(f[0]) | round_fp8(f[1]) << 8 | round_fp8(f[2]) << 16 | round_fp8(f[3]) << 24;
}
#endif
static u32 pack_half2(float low, float high) { return round_half(low) | round_half(high) << 16; }
static void store_words(char* p, const u32 (&words)[OUT_WORDS]) {
  if ((uintptr_t)p % sizeof(words)) failure = 2;
  memcpy(p, words, sizeof(words));
}
"""

ENTRY = """
extern "C" int {name}_emulated(long grid, const i64* a, const i64* within, long num) {{
  bounds = num ? within : nullptr;
  num_bounds = num;
  reads.clear();
  run(grid, [&] {{ {name}({args}); }});
  return failure;
}}
extern "C" const i64* {name}_reads(long* num) {{
  *num = reads.size();
  return reads.data();
}}
"""


FAILURES = {1: "a divergent barrier", 2: "a misaligned vector", 3: "a read out of bounds"}

#: Address and bytes of all that kernels may read, while there is any.
within: list[tuple[int, int]] = []

#: Takes the addresses that a run has read, or brought to L2, as an array.
seen: Callable[[np.ndarray], None] | None = None


def array(words: list[int]) -> Any:
    """64-bit words as C takes them."""
    return (ctypes.c_int64 * len(words))(*words)


def install(monkeypatch: Any, folder: Path) -> None:
    """Let the ``cuda`` path take CPU tensors and run here.

    Args:
        monkeypatch: pytest's; undoes it all.
        folder: Where to compile.
    """
    loaded: dict[Any, Any] = {}

    def load_kernel(source: Path, device: Any, name: str, defines: dict[str, int]) -> Any:
        key = (name, *sorted(defines.items()))
        if key not in loaded:
            library = ctypes.CDLL(str(build(source, name, defines, folder / f"{len(loaded)}")))
            loaded[key] = library[f"{name}_emulated"]
            loaded[key].reads = library[f"{name}_reads"]
            loaded[key].reads.restype = ctypes.POINTER(ctypes.c_int64)
        return loaded[key], None

    class Launch:
        """``driver.Launch`` with the kernel run here."""

        def __init__(
            self, kernel: Any, grid: Any, threads: int, formats: str, values: Any, changing: int,
            *, pdl: bool, owner: Any,
        ) -> None:  # fmt: skip
            assert len(formats) == len(values) and pdl and grid[1:] == (1, 1)
            self.kernel, self.grid, self.formats = kernel, grid[0], formats
            self.rest, self.changing = values[changing:], changing

        def __call__(self, stream: int, *args: Any) -> None:
            assert len(args) == self.changing
            words = [
                struct.unpack("q", struct.pack("d" if letter == "d" else "q", x))[0]
                for letter, x in zip(self.formats, (*args, *self.rest))
            ]
            limits = [end for x in within for end in (x[0], sum(x))]
            failure = self.kernel(
                ctypes.c_long(self.grid), array(words), array(limits), ctypes.c_long(len(within))
            )
            assert failure == 0, FAILURES[failure]
            if seen is not None:
                num = ctypes.c_long()
                found = self.kernel.reads(ctypes.byref(num))
                seen(np.array(found[: num.value], dtype=np.int64))

        def filled(self, stream: int, *args: Any) -> driver.Filled:
            def call(*args: Any) -> int:
                self(*args)
                return 0

            return driver.Filled((stream, *args), SimpleNamespace(_call=call))  # type: ignore

    monkeypatch.setattr(nvrtc, "load_kernel", load_kernel)
    monkeypatch.setattr(driver, "Launch", Launch)
    monkeypatch.setattr(driver, "current_device", lambda: None)
    monkeypatch.setattr(driver, "current_stream", lambda index: 0)
    monkeypatch.setattr(layouts, "_empty_strided_cuda", _empty_strided_cpu)
    monkeypatch.setattr(cuda_merge, "has_pdl", lambda device: True)
    monkeypatch.setattr(cuda_merge, "resident_threads", lambda device: 256)
    monkeypatch.setitem(dispatch._REASONS, "cuda", dispatch._kernel_reasons)
    pair.forget()
    many.forget()


def build(source: Path, name: str, defines: dict[str, int], stem: Path) -> Path:
    """Compile one specialisation as a shared library."""
    text = nvrtc.text_of(source)
    start = text.index("// ---- hardware")
    end = text.index("// ---- vectors")
    text = PRELUDE + text[:start] + HARDWARE + text[end:]
    text += ENTRY.format(name=name, args=", ".join(arguments(name, defines)))
    file = stem.with_suffix(".cpp")
    file.write_text(text)
    library = stem.with_suffix(".so")
    flags = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fPIC", "-shared"]
    flags += ["-fno-gnu-unique"]  # shared memory is static data, which must not be shared so far
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    command = [str(COMPILER), *flags, *macros, str(file), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    return library


def arguments(name: str, defines: dict[str, int]) -> list[str]:
    """C++ expressions that turn 64-bit words back into a kernel's arguments."""
    pointer, number = "({})a[{}]", "a[{}]"
    if name == "merge_pair":
        kinds = ["const char*", "const float*", "const char*", "const float*", "char*", "float*"]
        kinds += ["", "", "", "const float*", "double"] + [""] * (12 * defines["STRIDED"])
    else:
        states, jumps = ["const char*", "const float*"], ["", ""]
        if defines["SEPARATE"]:
            states, jumps = ["const char*"] * 8 + ["const float*"] * 8, []
        kinds = [*states, "const void*", "char*", "float*", *jumps, "", "", ""]
        kinds += [""] * (8 * defines["STRIDED"])
    found = []
    for i, kind in enumerate(kinds):
        if kind == "double":
            found.append(f"*(const double*)&a[{i}]")
        else:
            found.append(pointer.format(kind, i) if kind else number.format(i))
    return found


__all__ = ["COMPILER", "install"]
