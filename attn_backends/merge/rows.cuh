// What the merge kernels of pair.cu and many.cu share: one pass over memory, 16 bytes per access.
//
// Two states of a row (token, head) give
//
//     M = max(a, b)    w_a = exp(a - M) / (exp(a - M) + exp(b - M))    o = w_a o_a + w_b o_b
//     lse = M + ln(exp(a - M) + exp(b - M))
//
// in float32; +inf counts as -inf (no keys), and both empty gives (0, -inf). The kernels move 776
// bytes per row of 128 bfloat16 and compute next to nothing, so all care goes into memory and into
// the time between a launch and its first load:
//
// - A thread owns one vector of 16 bytes per row and computes that row's weights by itself: sixteen
//   threads that read one LSE cost less than a barrier between weights and vectors.
// - A block owns whole rows. One thread each merges their LSEs once more and writes them, so that
//   few threads take the time of a logarithm: while outputs are on their way, or after a barrier
//   where an LSE is merged in place. A thread writes exactly the vectors it read, so that an output
//   may be merged in place too.
// - An output of weight 0 is not read: LSEs come first, and what they give no weight is left alone.
//   To know that takes one comparison, before any exponential.
// - With PDL the kernel may be launched while the one ahead of it still runs; it waits for that one
//   with all addresses at hand, and lets the next one come as early. With FETCH, blocks that wait
//   bring to L2 what the LSEs call for that lie there at the time, and AHEAD LSEs for later blocks;
//   so reading LSEs before outputs costs next to nothing.
// - LSEs that run along tokens, a [H, T] buffer, are visited in tiles of tokens x heads, so that
//   every sector read is used in either layout.
//
// The host compiles a kernel once per layout class, with macros:
//   IN_TYPE, OUT_TYPE   0 float32, 1 float16, 2 bfloat16; OUT_TYPE also 3 float8_e4m3fn
//   HEAD_DIM            elements per row, a multiple of 16 bytes
//   HAS_B               0: the second output is zeros (a sink)
//   IN_PLACE            1: an output is an input, so reads must stay in order with writes
//   STRIDED             0: all tensors are contiguous [T, H, HEAD_DIM] and [T, H]
//   TILE_TOKENS         tokens per tile for token-major LSEs; 0: rows in flat order
//   THREADS             per block
//   PASS_ROWS           rows of a block in one pass
//   PDL, FETCH          1: as above; loads are ld.global.nc only without PDL, since that is for
//                       memory that nobody writes while the kernel lives, waiting included; it
//                       made no difference in either case
//   RESIDENT            blocks that the device runs at once, about

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define INF __int_as_float(0x7f800000)

#define IN_BYTES (IN_TYPE == 0 ? 4 : 2)
#define OUT_BYTES (OUT_TYPE == 0 ? 4 : OUT_TYPE == 3 ? 1 : 2)
#define WIDTH (16 / IN_BYTES)               // elements per vector
#define OUT_WORDS (WIDTH * OUT_BYTES / 4)   // 32-bit words of a vector in the output
#define VECTORS (HEAD_DIM / WIDTH)          // vectors per row
#define LINE 128                            // bytes that L2 fetches at a time

struct Vec { u32 x, y, z, w; };

// ---- hardware: memory and number formats (tests replace this part to run on a CPU) ------------

__device__ __forceinline__ Vec load_vec(const char* p) {
  Vec v;
#if IN_PLACE
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
#elif PDL  // what was not read-only since the launch is not for the read-only path
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
#else
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
#endif
  return v;
}

__device__ __forceinline__ float load_lse(const float* p) {
  float v;
#if IN_PLACE || PDL
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
#else
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
#endif
  return v;
}

// An LSE that a kernel ahead may still be writing, past L1, which would keep it.
__device__ __forceinline__ float peek_lse(const float* p) {
  float v;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}

// The warp's answers, one bit each, and whether this thread acts on them.
__device__ __forceinline__ u32 vote(bool yes) { return __ballot_sync(THREADS % 32 ? __activemask() : ~0u, yes); }
__device__ __forceinline__ bool speaks_for_warp() { return threadIdx.x % 32 == 0; }

// Let the kernel behind us be launched.
__device__ __forceinline__ void let_next_come() {
#if PDL
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Wait for the kernel ahead, whose results we may read.
__device__ __forceinline__ void wait_for_previous() {
#if PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Have memory brought to L2. That is no read: what a kernel ahead still writes to it arrives at L2
// too, where all of the GPU sees the same, and is there when it is loaded.
__device__ __forceinline__ void fetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" :: "l"(p));
}

// The same for whole vectors that lie in a row; since sm_90, like PDL.
__device__ __forceinline__ void fetch_bulk(const void* p, u32 bytes) {
#if PDL
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(p), "r"(bytes));
#endif
}

// 1 / x, the nearest float32 or its neighbour, for x in [1, 2^31]; NaN stays NaN.
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return fmaf(r, fmaf(-x, r, 1.f), r);
}

__device__ __forceinline__ float half_to_float(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}

__device__ __forceinline__ u32 pack_half2(float low, float high) {
  u32 word;
#if OUT_TYPE == 1
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
  return word;
}

#if OUT_TYPE == 3
__device__ __forceinline__ u32 pack_fp8x4(const float* f) {
  u16 low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(f[1]), "f"(f[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(f[3]), "f"(f[2]));
  return (u32)low | (u32)high << 16;
}
#endif

// Stores the 32-bit words of one vector in the output type: 1, 2 or 4.
__device__ __forceinline__ void store_words(char* p, const u32 (&words)[OUT_WORDS]) {
#if OUT_WORDS == 4
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(p), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
#elif OUT_WORDS == 2
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(p), "r"(words[0]), "r"(words[1]) : "memory");
#else
  asm volatile("st.global.u32 [%0], %1;" :: "l"(p), "r"(words[0]) : "memory");
#endif
}

// ---- vectors ------------------------------------------------------------------------------

__device__ __forceinline__ void unpack(u32 word, float& low, float& high) {
#if IN_TYPE == 1
  low = half_to_float((u16)word);
  high = half_to_float((u16)(word >> 16));
#else
  low = __uint_as_float(word << 16);
  high = __uint_as_float(word & 0xffff0000u);
#endif
}

__device__ __forceinline__ void unpack(const Vec& v, float (&f)[WIDTH]) {
#if IN_TYPE == 0
  f[0] = __uint_as_float(v.x);
  f[1] = __uint_as_float(v.y);
  f[2] = __uint_as_float(v.z);
  f[3] = __uint_as_float(v.w);
#else
  unpack(v.x, f[0], f[1]);
  unpack(v.y, f[2], f[3]);
  unpack(v.z, f[4], f[5]);
  unpack(v.w, f[6], f[7]);
#endif
}

__device__ __forceinline__ void store_vec(char* p, const float (&f)[WIDTH]) {
  u32 words[OUT_WORDS];
#pragma unroll
  for (int i = 0; i < OUT_WORDS; ++i) {
#if OUT_TYPE == 0
    words[i] = __float_as_uint(f[i]);
#elif OUT_TYPE == 3
    words[i] = pack_fp8x4(f + 4 * i);
#else
    words[i] = pack_half2(f[2 * i], f[2 * i + 1]);
#endif
  }
  store_words(p, words);
}

// ---- where rows are --------------------------------------------------------------------------

struct Strides { i64 token, head; };  // in elements; contiguous unless STRIDED

__device__ __forceinline__ i64 row_offset(u32 row, u32 token, u32 head, Strides s, int width) {
#if STRIDED
  return token * s.token + head * s.head;
#else
  return (i64)row * width;
#endif
}

// The rows of a block: ROWS consecutive rows in flat order, or a tile of tokens x heads.
template <int ROWS>
struct Tile {
  u32 num_tokens, num_heads;
#if TILE_TOKENS
  static constexpr int TOKENS = TILE_TOKENS < ROWS ? TILE_TOKENS : ROWS;
  static constexpr int HEADS = ROWS / TOKENS;
  static constexpr int SIZE = TOKENS * HEADS;
  u32 token_0, head_0;

  __device__ Tile(u32 index, u32 num_tokens, u32 num_heads)
      : num_tokens(num_tokens), num_heads(num_heads) {
    u32 groups = (num_heads + HEADS - 1) / HEADS;
    token_0 = index / groups * TOKENS;
    head_0 = index % groups * HEADS;
  }
  // Slot r of the tile, heads fastest, as outputs lie in memory.
  __device__ __forceinline__ bool find(int r, u32& row, u32& token, u32& head) const {
    token = token_0 + r / HEADS;
    head = head_0 + r % HEADS;
    row = token * num_heads + head;
    return r < SIZE && token < num_tokens && head < num_heads;
  }
#else
  static constexpr int SIZE = ROWS;
  u32 first;

  __device__ Tile(u32 index, u32 num_tokens, u32 num_heads)
      : num_tokens(num_tokens), num_heads(num_heads), first(index * ROWS) {}
  __device__ __forceinline__ bool find(int r, u32& row, u32& token, u32& head) const {
    row = first + r;
#if STRIDED
    token = row / num_heads;
    head = row - token * num_heads;
#endif
    return row < num_tokens * num_heads;
  }
#endif
};

// ---- weights -----------------------------------------------------------------------------------

#define NO_WEIGHT 103.9722f  // exp(-x) is 0 in float32 for any x beyond

// An LSE as kernels may give it: +inf says, as -inf, that there are no keys.
__device__ __forceinline__ float no_keys(float lse) { return lse == INF ? -INF : lse; }

// Whether a state has any weight beside the largest, or another, LSE; told without exp.
__device__ __forceinline__ bool weighs(float lse, float other) {
  return lse != -INF && !(other - lse > NO_WEIGHT);
}

// Have brought to L2 the contiguous rows first + i of all bits i of a warp's mask.
__device__ __forceinline__ void fetch_runs(const char* o, u32 first, u32 mask) {
  if (!speaks_for_warp()) return;
  while (mask) {
    const u32 begin = __ffs(mask) - 1, rest = ~(mask >> begin);
    const u32 num = rest ? __ffs(rest) - 1 : 32;
    fetch_bulk(o + (i64)(first + begin) * HEAD_DIM * IN_BYTES, num * HEAD_DIM * IN_BYTES);
    mask = begin + num < 32 ? mask >> (begin + num) << (begin + num) : 0;
  }
}
