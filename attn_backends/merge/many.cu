// Merging any number of states of each row in one pass.
//
// Macros beside those of rows.cuh:
//   BATCH               states that a thread has in flight
//   SPLIT               groups of threads that share the states of a row
//   SHORT               1: a group has at most BATCH states
//   FULL                1: each group has BATCH states, whatever the row
//   SEPARATE            1: states come as separate tensors of one layout, up to 8; FULL, no SPLIT
//   COUNT_BYTES         bytes of an element of the row counts; 0: there are none

#include "rows.cuh"

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
