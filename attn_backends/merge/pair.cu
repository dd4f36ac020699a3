// Merging two states of each row.
//
// Macros beside those of rows.cuh:
//   UNROLL              rows of a thread, all loaded at once: a block has PASS_ROWS * UNROLL rows;
//                       two were slower than one at every size measured
//   AHEAD               1: blocks that wait bring LSEs for later blocks to L2, as rows.cuh tells

#include "rows.cuh"

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
