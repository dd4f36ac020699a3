// Merging attention states on a GPU: one pass over memory, 16 bytes per access.
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
// The host compiles this file once per layout class, with macros:
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
//   MANY                0: compile merge_pair, for
//   UNROLL              rows of a thread, all loaded at once: a block has PASS_ROWS * UNROLL rows;
//                       two were slower than one at every size measured
//   AHEAD               1: as above
//                       1: compile merge_many, for
//   BATCH               states that a thread has in flight
//   SPLIT               groups of threads that share the states of a row
//   SHORT               1: a group has at most BATCH states
//   FULL                1: each group has BATCH states, whatever the row
//   SEPARATE            1: states come as separate tensors of one layout, up to 8; FULL, no SPLIT
//   COUNT_BYTES         bytes of an element of the row counts; 0: there are none

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

#if !MANY
// ---- two states ------------------------------------------------------------------------------

struct Pair {
  const char* o_a; const float* lse_a; const char* o_b; const float* lse_b;
  char* o; float* lse;
  u32 num_tokens, num_heads;
  u32 num_prefix;  // tokens from here on ignore state a
  float scale;     // divides a float8 result
  Strides s_o_a, s_lse_a, s_o_b, s_lse_b, s_o, s_lse;
};

// Weights of both sides, 1 / (1 + e) for the larger LSE and e / (1 + e) for the other, and what the
// merged LSE is made of.
struct Merged {
  float w_a, w_b, base, total;

  __device__ __forceinline__ float lse() const { return base + logf(total); }
};

__device__ __forceinline__ Merged merge_lses(float a, float b) {
  float e = expf(-fabsf(a - b));  // NaN if an LSE is, or if both are -inf
  float total = 1.f + e;
  float r = reciprocal(total);
  float q = e * r;
  q = fmaf(fmaf(-total, q, e), r, q);  // to nearest, as the other: the weights never pass 1
  if (a == -INF && b == -INF) q = r = 0.f;
  float peak = fmaxf(a, b);  // drops a NaN, which the logarithm brings back
  const bool none = peak == -INF;
  float base = none ? a + b : peak;
  total = none ? 1.f : total;
  return a >= b ? Merged{r, q, base, total} : Merged{q, r, base, total};
}

using PairRows = Tile<PASS_ROWS * UNROLL>;

// Where a row of both states lies, and what it is.
struct PairRow {
  u32 row, token, head;
  bool valid, has_a;

  __device__ __forceinline__ PairRow(const Pair& p, const PairRows& rows, int r, bool inside) {
    valid = rows.find(r, row, token, head) && inside;
#if TILE_TOKENS || STRIDED
    has_a = token < p.num_prefix;
#else
    has_a = row < p.num_prefix * p.num_heads;
#endif
  }
  __device__ __forceinline__ const float* lse_a(const Pair& p) const {
    return p.lse_a + row_offset(row, token, head, p.s_lse_a, 1);
  }
  __device__ __forceinline__ const float* lse_b(const Pair& p) const {
    return p.lse_b + row_offset(row, token, head, p.s_lse_b, 1);
  }
  __device__ __forceinline__ const char* o_a(const Pair& p, int column) const {
    return p.o_a + (row_offset(row, token, head, p.s_o_a, HEAD_DIM) + column) * IN_BYTES;
  }
  __device__ __forceinline__ const char* o_b(const Pair& p, int column) const {
    return p.o_b + (row_offset(row, token, head, p.s_o_b, HEAD_DIM) + column) * IN_BYTES;
  }
};

// Have brought to L2 what this block will read, as far as the LSEs tell that lie there now. A
// kernel ahead may still change them: then too much is brought, or too little, but nothing is
// merged by them.
__device__ __forceinline__ void fetch_pair_rows(const Pair& p, const PairRows& rows) {
#if !STRIDED && !TILE_TOKENS  // runs of rows that have weight, each one piece
  for (u32 base = threadIdx.x / 32 * 32; base < PairRows::SIZE; base += THREADS) {
    const u32 r = base + threadIdx.x % 32;
    const PairRow at(p, rows, r, r < PairRows::SIZE);
    bool need_a = false, need_b = false;
    if (at.valid) {
      const float a = at.has_a ? no_keys(peek_lse(at.lse_a(p))) : -INF;
      const float b = no_keys(peek_lse(at.lse_b(p)));
      need_a = weighs(a, b);
      need_b = HAS_B && weighs(b, a);
    }
    fetch_runs(p.o_a, rows.first + base, vote(need_a));
    fetch_runs(p.o_b, rows.first + base, vote(need_b));
  }
#else
  const int column = threadIdx.x % VECTORS * WIDTH, first = threadIdx.x / VECTORS;
  if (column * IN_BYTES % LINE) return;
#pragma unroll
  for (int k = 0; k < UNROLL; ++k) {
    const PairRow at(p, rows, first + k * PASS_ROWS, first < PASS_ROWS);
    if (!at.valid) continue;
    const float a = at.has_a ? no_keys(peek_lse(at.lse_a(p))) : -INF;
    const float b = no_keys(peek_lse(at.lse_b(p)));
    if (weighs(a, b)) fetch(at.o_a(p, column));
    if (HAS_B && weighs(b, a)) fetch(at.o_b(p, column));
  }
#endif
}

// Have the LSEs of a block yet to come brought to L2, so that its weights are known the sooner: one
// line, or a sector of each head where they run along tokens.
__device__ __forceinline__ void fetch_ahead(const Pair& p) {
#if AHEAD
#if TILE_TOKENS
  constexpr u32 PIECES = PairRows::HEADS;
#else
  constexpr u32 PIECES = 1;
#endif
  if (threadIdx.x >= PIECES) return;
  const PairRows later(blockIdx.x + RESIDENT, p.num_tokens, p.num_heads);
  const PairRow at(p, later, threadIdx.x, true);
  if (at.valid) fetch(at.lse_a(p)), fetch(at.lse_b(p));
#endif
}

// The merged LSEs of a block: a thread each, so that few take the time of a logarithm.
__device__ __forceinline__ void merge_pair_lses(const Pair& p, const PairRows& rows) {
  for (u32 r = threadIdx.x; r < PairRows::SIZE; r += THREADS) {
    const PairRow at(p, rows, r, true);
    if (!at.valid) continue;
    const float a = at.has_a ? no_keys(load_lse(at.lse_a(p))) : -INF;
    const float b = no_keys(load_lse(at.lse_b(p)));
    p.lse[row_offset(at.row, at.token, at.head, p.s_lse, 1)] = merge_lses(a, b).lse();
  }
}

__device__ __forceinline__ void merge_pair_rows(Pair& p, const PairRows& rows, const float* scale) {
  const int tid = threadIdx.x;
#pragma unroll 1
  for (int base = 0; base < VECTORS; base += THREADS) {  // once, but for rows wider than a block
    const int column = (base + tid % VECTORS) * WIDTH;
    const int first = tid / VECTORS;
    const bool inside = VECTORS <= THREADS ? first < PASS_ROWS : base + tid < VECTORS;
    Vec v_a[UNROLL], v_b[UNROLL];
    float a[UNROLL], b[UNROLL];
    bool valid[UNROLL], has_a[UNROLL];
    const float *lse_a[UNROLL], *lse_b[UNROLL];
    const char *o_a[UNROLL], *o_b[UNROLL];
    i64 out[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
      const PairRow at(p, rows, first + k * PASS_ROWS, inside);
      valid[k] = at.valid;
      has_a[k] = at.has_a;
      lse_a[k] = at.lse_a(p);
      lse_b[k] = at.lse_b(p);
      o_a[k] = at.o_a(p, column);
      o_b[k] = at.o_b(p, column);
      out[k] = row_offset(at.row, at.token, at.head, p.s_o, HEAD_DIM) + column;
      v_a[k] = v_b[k] = Vec{0, 0, 0, 0};
    }
    wait_for_previous();  // with all addresses at hand
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
      if (!valid[k]) continue;
      a[k] = load_lse(lse_a[k]);
      b[k] = load_lse(lse_b[k]);
    }
#if OUT_TYPE == 3
    if (scale) p.scale = *scale;
#endif
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
      if (!valid[k]) continue;
      a[k] = has_a[k] ? no_keys(a[k]) : -INF;
      b[k] = no_keys(b[k]);
      if (weighs(a[k], b[k])) v_a[k] = load_vec(o_a[k]);
      if (HAS_B && weighs(b[k], a[k])) v_b[k] = load_vec(o_b[k]);
    }
#if !IN_PLACE
    if (base + THREADS >= VECTORS) merge_pair_lses(p, rows);  // while outputs are on their way
#endif
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
      if (!valid[k]) continue;
      const Merged m = merge_lses(a[k], b[k]);  // by every thread: a branch would take longer
      if (m.w_a == 0.f) v_a[k] = Vec{0, 0, 0, 0};
      if (m.w_b == 0.f) v_b[k] = Vec{0, 0, 0, 0};
      float f_a[WIDTH], f_b[WIDTH];
      unpack(v_a[k], f_a);
      unpack(v_b[k], f_b);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        // No fused multiply-add: the two sides then commute bit for bit.
        f_a[i] = __fadd_rn(__fmul_rn(m.w_a, f_a[i]), __fmul_rn(m.w_b, f_b[i]));
#if OUT_TYPE == 3
        f_a[i] = __fdiv_rn(f_a[i], p.scale);
#endif
      }
      store_vec(p.o + out[k] * OUT_BYTES, f_a);
    }
  }
#if IN_PLACE
  __syncthreads();  // every thread of a row has read its LSEs
  merge_pair_lses(p, rows);
#endif
}

#if STRIDED
#define STRIDE_PARAMS                                                                       \
  , i64 o_a_t, i64 o_a_h, i64 lse_a_t, i64 lse_a_h, i64 o_b_t, i64 o_b_h, i64 lse_b_t, \
      i64 lse_b_h, i64 o_t, i64 o_h, i64 lse_t, i64 lse_h
#define STRIDE_ARGS                                                                         \
  , {o_a_t, o_a_h}, {lse_a_t, lse_a_h}, {o_b_t, o_b_h}, {lse_b_t, lse_b_h}, {o_t, o_h}, \
      {lse_t, lse_h}
#else
#define STRIDE_PARAMS
#define STRIDE_ARGS
#endif

// scale_ptr, if not null, holds the scale. Integers are 64 bits wide, as the host passes them.
extern "C" __global__ void __launch_bounds__(THREADS)
merge_pair(const char* o_a, const float* lse_a, const char* o_b, const float* lse_b, char* o,
           float* lse, i64 num_tokens, i64 num_heads, i64 num_prefix, const float* scale_ptr,
           double scale STRIDE_PARAMS) {
  let_next_come();
  Pair p{o_a, lse_a, o_b, lse_b, o, lse, (u32)num_tokens, (u32)num_heads,
         (u32)(num_prefix < 0 ? num_tokens : num_prefix), (float)scale STRIDE_ARGS};
  const PairRows rows(blockIdx.x, p.num_tokens, p.num_heads);
  fetch_ahead(p);
#if FETCH
  if (blockIdx.x < RESIDENT) fetch_pair_rows(p, rows);
#endif
  merge_pair_rows(p, rows, scale_ptr);
}

#else
// ---- n states --------------------------------------------------------------------------------

constexpr int GROUP_THREADS = THREADS / SPLIT;

struct Many {
#if SEPARATE
  const char* o[8]; const float* lse[8];          // of each state
#else
  const char* o; const float* lse;                // of the first state
  i64 o_stride, lse_stride;                       // from state to state, in elements
#endif
  const void* counts;
  char* out; float* out_lse;
  u32 num_states, num_tokens, num_heads;
  Strides s_o, s_lse, s_out, s_out_lse;

#if SEPARATE
  __device__ __forceinline__ const char* state_o(u32 j) const { return o[j]; }
  __device__ __forceinline__ const float* state_lse(u32 j) const { return lse[j]; }
#else
  __device__ __forceinline__ const char* state_o(u32 j) const { return o + j * o_stride * IN_BYTES; }
  __device__ __forceinline__ const float* state_lse(u32 j) const { return lse + j * lse_stride; }
#endif
  // States that a token merges.
  __device__ __forceinline__ u32 count(u32 token) const {
#if COUNT_BYTES == 4
    i64 n = ((const int*)counts)[token];
#elif COUNT_BYTES == 8
    i64 n = ((const i64*)counts)[token];
#else
    i64 n = num_states;
#endif
    return n < 0 ? 0 : n < num_states ? (u32)n : num_states;
  }
};

#if TILE_TOKENS || STRIDED
#define COUNT_TOKEN token
#else
#define COUNT_TOKEN (row / p.num_heads)
#endif

__device__ __forceinline__ float peak_of(const float (&lses)[BATCH], float peak) {
#pragma unroll
  for (int i = 0; i < BATCH; ++i) peak = fmaxf(peak, lses[i]);
  return peak;
}

// Peak of some LSEs, and the sum of exp(lse - peak); a NaN stays in the sum.
struct Mass {
  float peak, sum;

  __device__ __forceinline__ float shift() const { return peak == -INF ? 0.f : peak; }
  __device__ __forceinline__ float inverse() const { return sum == 0.f ? 0.f : reciprocal(sum); }
  __device__ __forceinline__ float lse() const { return shift() + logf(sum); }
  // part / sum, to nearest.
  __device__ __forceinline__ float share(float part, float inverse) const {
    float q = part * inverse;
    return fmaf(fmaf(-sum, q, part), inverse, q);
  }
  __device__ __forceinline__ void add(const float (&lses)[BATCH]) {
    float before = peak;
    peak = peak_of(lses, peak);
    sum *= expf(before - shift());
#pragma unroll
    for (int i = 0; i < BATCH; ++i) sum += expf(lses[i] - shift());
  }
};

// LSEs of a row's states first, first + SPLIT and so on, as far as it has them. All are asked for
// before any is looked at, states beyond the last by reading the first once more.
__device__ __forceinline__ void load_lses(
    const Many& p, u32 first, u32 count, i64 offset, float (&lses)[BATCH]) {
#pragma unroll
  for (int i = 0; i < BATCH; ++i) {
    const u32 j = first + i * SPLIT;
    lses[i] = load_lse(p.state_lse(FULL || j < count ? j : 0) + offset);
  }
#pragma unroll
  for (int i = 0; i < BATCH; ++i)
    lses[i] = FULL || first + i * SPLIT < count ? no_keys(lses[i]) : -INF;
}

// Outputs of the same states, of those that have weight beside the row's largest LSE.
__device__ __forceinline__ void load_weighty(
    const Many& p, u32 first, i64 at, const float (&lses)[BATCH], float peak, Vec (&v)[BATCH]) {
#pragma unroll
  for (int i = 0; i < BATCH; ++i)
    if (weighs(lses[i], peak)) v[i] = load_vec(p.state_o(first + i * SPLIT) + at);
}

// Have brought to L2 what this block will read of up to BATCH states, as far as the LSEs tell that
// lie there now; see fetch_pair_rows.
__device__ __forceinline__ void fetch_many_rows(const Many& p, const Tile<PASS_ROWS>& rows) {
  for (u32 base = threadIdx.x / 32 * 32; base < PASS_ROWS; base += THREADS) {
    const u32 r = base + threadIdx.x % 32;
    u32 row, token, head;
    const bool valid = r < PASS_ROWS && rows.find(r, row, token, head);
    float lses[BATCH], peak = -INF;
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      lses[i] = -INF;
      if (valid)
        lses[i] = peek_lse(p.state_lse(i) + row_offset(row, token, head, p.s_lse, 1));
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      lses[i] = no_keys(lses[i]);
      peak = fmaxf(peak, lses[i]);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const bool need = weighs(lses[i], peak);
#if !STRIDED && !TILE_TOKENS
      fetch_runs(p.state_o(i), rows.first + base, vote(need));
#else
      const i64 at = row_offset(row, token, head, p.s_o, HEAD_DIM) * IN_BYTES;
      for (u32 line = 0; need && line < HEAD_DIM * IN_BYTES; line += LINE)
        fetch(p.state_o(i) + at + line);
#endif
    }
  }
}

__device__ __forceinline__ void merge_many_rows(const Many& p, const Tile<PASS_ROWS>& rows) {
#if SPLIT > 1
  __shared__ float partial[SPLIT][WIDTH][GROUP_THREADS];
  __shared__ Mass masses[SPLIT][GROUP_THREADS];
#endif
  const int group = SPLIT > 1 ? threadIdx.x / GROUP_THREADS : 0;
  const int tid = SPLIT > 1 ? threadIdx.x % GROUP_THREADS : threadIdx.x;
#pragma unroll 1
  for (int base = 0; base < VECTORS; base += GROUP_THREADS) {  // once, but for wide rows
    const int column = (base + tid % VECTORS) * WIDTH, r = tid / VECTORS;
    u32 row = 0, token = 0, head = 0;
    const bool inside = VECTORS <= GROUP_THREADS ? r < PASS_ROWS : base + tid < VECTORS;
    const bool valid = rows.find(r, row, token, head) && inside;
    if (!valid) row = token = head = 0;
    const i64 at_lse = row_offset(row, token, head, p.s_lse, 1);
    const i64 at = (row_offset(row, token, head, p.s_o, HEAD_DIM) + column) * IN_BYTES;
    float lses[BATCH], acc[WIDTH] = {};
    Vec v[BATCH] = {};
    Mass mass{-INF, 0.f};
    wait_for_previous();  // with all addresses at hand
    const u32 count = valid ? p.count(COUNT_TOKEN) : 0;
#if SHORT
    load_lses(p, group, count, at_lse, lses);
#if SPLIT == 1
    load_weighty(p, 0, at, lses, peak_of(lses, -INF), v);
#endif
    mass.add(lses);
#else
    for (u32 first = group; first < count; first += BATCH * SPLIT) {
      load_lses(p, first, count, at_lse, lses);
      mass.add(lses);
    }
#endif
#if SPLIT > 1
    masses[group][tid] = mass;
    __syncthreads();
    mass = Mass{-INF, 0.f};
    for (int s = 0; s < SPLIT; ++s) mass.peak = fmaxf(mass.peak, masses[s][tid].peak);
    for (int s = 0; s < SPLIT; ++s)
      mass.sum += masses[s][tid].sum * expf(masses[s][tid].peak - mass.shift());
#if SHORT
    load_weighty(p, group, at, lses, mass.peak, v);
#endif
#endif
    const float inverse = mass.inverse();
#if !SHORT
    for (u32 first = group; first < count; first += BATCH * SPLIT)
#endif
    {
#if !SHORT
      load_lses(p, first, count, at_lse, lses);
      load_weighty(p, first, at, lses, mass.peak, v);
#endif
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const float w = mass.share(expf(lses[i] - mass.shift()), inverse);
        float f[WIDTH];
        if (w == 0.f) v[i] = Vec{0, 0, 0, 0};
        unpack(v[i], f);
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) acc[e] = fmaf(w, f[e], acc[e]);
      }
    }
#if SPLIT > 1
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) partial[group][e][tid] = acc[e];
    __syncthreads();
    for (int s = 1; group == 0 && s < SPLIT; ++s) {
#pragma unroll
      for (int e = 0; e < WIDTH; ++e) acc[e] += partial[s][e][tid];
    }
#endif
    if (valid && group == 0)
      store_vec(p.out + (row_offset(row, token, head, p.s_out, HEAD_DIM) + column) * OUT_BYTES, acc);
    if (base + GROUP_THREADS < VECTORS) continue;
    // Last, since an LSE may be merged in place and every thread of the row has read it.
#if IN_PLACE && SPLIT == 1
    __syncthreads();
#endif
    if (valid && group == 0 && (VECTORS <= GROUP_THREADS ? tid % VECTORS : tid) == 0)
      p.out_lse[row_offset(row, token, head, p.s_out_lse, 1)] = mass.lse();
  }
}

#if SEPARATE
#define STATE_PARAMS                                                                          \
  const char *o0, const char *o1, const char *o2, const char *o3, const char *o4,             \
      const char *o5, const char *o6, const char *o7, const float *l0, const float *l1,       \
      const float *l2, const float *l3, const float *l4, const float *l5, const float *l6,    \
      const float *l7
#define JUMP_PARAMS
#define STATE_ARGS {o0, o1, o2, o3, o4, o5, o6, o7}, {l0, l1, l2, l3, l4, l5, l6, l7}
#else
#define STATE_PARAMS const char *o, const float *lse
#define JUMP_PARAMS i64 o_n, i64 lse_n,
#define STATE_ARGS o, lse, o_n, lse_n
#endif

#if STRIDED
#define STRIDE_PARAMS \
  , i64 o_t, i64 o_h, i64 lse_t, i64 lse_h, i64 out_t, i64 out_h, i64 out_lse_t, i64 out_lse_h
#define STRIDE_ARGS , {o_t, o_h}, {lse_t, lse_h}, {out_t, out_h}, {out_lse_t, out_lse_h}
#else
#define STRIDE_PARAMS
#define STRIDE_ARGS
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
merge_many(STATE_PARAMS, const void* counts, char* out, float* out_lse, JUMP_PARAMS i64 num_states,
           i64 num_tokens, i64 num_heads STRIDE_PARAMS) {
  let_next_come();
  const Many p{STATE_ARGS, counts, out, out_lse, (u32)num_states, (u32)num_tokens,
               (u32)num_heads STRIDE_ARGS};
  const Tile<PASS_ROWS> rows(blockIdx.x, p.num_tokens, p.num_heads);
#if FETCH && FULL && SPLIT == 1
  if (blockIdx.x < RESIDENT) fetch_many_rows(p, rows);
#endif
  merge_many_rows(p, rows);
}
#endif
