// Merging attention states on a GPU: one pass over memory, 16 bytes per access.
//
// Two states of a row (token, head) give
//
//     M = max(a, b)    w_a = exp(a - M) / (exp(a - M) + exp(b - M))    o = w_a o_a + w_b o_b
//     lse = M + ln(exp(a - M) + exp(b - M))
//
// in float32; +inf counts as -inf (no keys), and both empty gives (0, -inf). The kernels move 776
// bytes per row of 128 bfloat16 and compute next to nothing, so all care goes into memory:
//
// - A block owns whole rows. One thread per row reads its LSEs, computes its weights once, writes
//   them to shared memory and writes the merged LSE; nobody else touches these LSEs, so an LSE may
//   be merged in place. A barrier later all threads combine vectors of 16 bytes.
// - A thread issues all its loads before the first use, and writes exactly the vectors it read,
//   so an output may be merged in place at any head dim.
// - The kernel for large problems reads no output of weight 0. The one for small problems, where
//   latency decides, issues those loads before the weights are known and selects afterwards.
// - LSEs that run along tokens, a [H, T] buffer, are visited in tiles of tokens x heads, so that
//   every sector read is used in either layout.
//
// The host compiles this file once per layout class, with macros:
//   IN_TYPE, OUT_TYPE   0 float32, 1 float16, 2 bfloat16; OUT_TYPE also 3 float8_e4m3fn
//   HEAD_DIM            elements per row, a multiple of 16 bytes
//   HAS_B               0: the second output is zeros (a sink)
//   IN_PLACE            1: an output is an input, so reads must not use the read-only path
//   STRIDED             0: all tensors are contiguous [T, H, HEAD_DIM] and [T, H]
//   TILE_TOKENS         tokens per tile for token-major LSEs; 0: rows in flat order
//   THREADS             per block
//   MANY                0: compile merge_pair_small and merge_pair_large for
//                          SMALL_UNROLL, SMALL_ROWS, LARGE_UNROLL, LARGE_ROWS (rows per block)
//                       1: compile merge_many_long and merge_many_wide for
//                          LONG_SPLIT, LONG_ROWS, WIDE_ROWS, and
//   SEPARATE            1: states come as separate tensors of one layout, up to 8
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

struct Vec { u32 x, y, z, w; };

// ---- hardware: memory and number formats (tests replace this part to run on a CPU) ------------

__device__ __forceinline__ Vec load_vec(const char* p) {
  Vec v;
#if IN_PLACE
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
#else
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
#endif
  return v;
}

__device__ __forceinline__ float load_lse(const float* p) {
  float v;
#if IN_PLACE
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
#else
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
#endif
  return v == INF ? -INF : v;
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

  __device__ Tile(u32 num_tokens, u32 num_heads) : num_tokens(num_tokens), num_heads(num_heads) {
    u32 groups = (num_heads + HEADS - 1) / HEADS;
    token_0 = blockIdx.x / groups * TOKENS;
    head_0 = blockIdx.x % groups * HEADS;
  }
  // Slot r of the tile, heads fastest, as outputs lie in memory.
  __device__ __forceinline__ bool find(int r, u32& row, u32& token, u32& head) const {
    token = token_0 + r / HEADS;
    head = head_0 + r % HEADS;
    row = token * num_heads + head;
    return token < num_tokens && head < num_heads;
  }
  // The i-th slot to visit for token-major LSEs.
  __device__ static __forceinline__ int lse_slot(int i) {
    return i % TOKENS * HEADS + i / TOKENS;
  }
#else
  static constexpr int SIZE = ROWS;

  __device__ Tile(u32 num_tokens, u32 num_heads) : num_tokens(num_tokens), num_heads(num_heads) {}
  __device__ __forceinline__ bool find(int r, u32& row, u32& token, u32& head) const {
    row = blockIdx.x * ROWS + r;
#if STRIDED
    token = row / num_heads;
    head = row - token * num_heads;
#endif
    return row < num_tokens * num_heads;
  }
  __device__ static __forceinline__ int lse_slot(int i) { return i; }
#endif
};

#if !MANY
// ---- two states ------------------------------------------------------------------------------

struct Pair {
  const char* o_a; const float* lse_a; const char* o_b; const float* lse_b;
  char* o; float* lse;
  u32 num_tokens, num_heads;
  i64 num_prefix;  // tokens from here on ignore state a; negative: none
  float scale;     // divides a float8 result
  Strides s_o_a, s_lse_a, s_o_b, s_lse_b, s_o, s_lse;
};

// Weights of both sides into w, and the merged LSE as result.
__device__ __forceinline__ float weigh(float a, float b, float2& w) {
  float peak = fmaxf(a, b);            // drops a NaN, which exp brings back
  if (peak == -INF) peak = 0.f;
  float e_a = expf(a - peak), e_b = expf(b - peak);
  float total = e_a + e_b;
  w = total == 0.f ? make_float2(0.f, 0.f) : make_float2(e_a / total, e_b / total);
  return peak + logf(total);
}

template <int UNROLL, int ROWS, bool SPECULATE>
__device__ __forceinline__ void merge_pair(const Pair& p) {
  using Rows = Tile<ROWS>;
  constexpr int STEP = THREADS * UNROLL;
  constexpr int TOTAL = Rows::SIZE * VECTORS;
  constexpr int CHUNKS = (TOTAL + STEP - 1) / STEP;  // 1, but for rows wider than a block's reach
  __shared__ float2 weights[Rows::SIZE];
  const Rows rows(p.num_tokens, p.num_heads);
  const int tid = threadIdx.x;

  Vec a[UNROLL], b[UNROLL];
  i64 out[UNROLL];  // element offset, negative where there is nothing to do
  auto load = [&](int chunk, bool known) {
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
      int index = chunk * STEP + k * THREADS + tid, r = index / VECTORS;
      u32 row, token, head;
      bool valid = index < TOTAL && rows.find(r, row, token, head);
      out[k] = -1;
      a[k] = b[k] = Vec{0, 0, 0, 0};
      if (!valid) continue;
      int column = index % VECTORS * WIDTH;
      out[k] = row_offset(row, token, head, p.s_o, HEAD_DIM) + column;
      float2 w = known ? weights[r] : make_float2(1.f, 1.f);
      if (w.x != 0.f)
        a[k] = load_vec(p.o_a + (row_offset(row, token, head, p.s_o_a, HEAD_DIM) + column) * IN_BYTES);
#if HAS_B
      if (w.y != 0.f)
        b[k] = load_vec(p.o_b + (row_offset(row, token, head, p.s_o_b, HEAD_DIM) + column) * IN_BYTES);
#endif
    }
  };

  if (SPECULATE) load(0, false);
  for (int i = tid; i < Rows::SIZE; i += THREADS) {
    int r = Rows::lse_slot(i);
    u32 row, token, head;
    if (!rows.find(r, row, token, head)) continue;
    float lse_a = load_lse(p.lse_a + row_offset(row, token, head, p.s_lse_a, 1));
    float lse_b = load_lse(p.lse_b + row_offset(row, token, head, p.s_lse_b, 1));
#if TILE_TOKENS || STRIDED
    if (p.num_prefix >= 0 && token >= p.num_prefix) lse_a = -INF;
#else
    if (p.num_prefix >= 0 && row >= p.num_prefix * p.num_heads) lse_a = -INF;
#endif
    p.lse[row_offset(row, token, head, p.s_lse, 1)] = weigh(lse_a, lse_b, weights[r]);
  }
  __syncthreads();
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    if (!SPECULATE || chunk > 0) load(chunk, true);
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
      if (out[k] < 0) continue;
      float2 w = weights[(chunk * STEP + k * THREADS + tid) / VECTORS];
      if (SPECULATE && w.x == 0.f) a[k] = Vec{0, 0, 0, 0};
      if (SPECULATE && w.y == 0.f) b[k] = Vec{0, 0, 0, 0};
      float f_a[WIDTH], f_b[WIDTH];
      unpack(a[k], f_a);
      unpack(b[k], f_b);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        // No fused multiply-add: the two sides then commute bit for bit.
        f_a[i] = __fadd_rn(__fmul_rn(w.x, f_a[i]), __fmul_rn(w.y, f_b[i]));
#if OUT_TYPE == 3
        f_a[i] = __fdiv_rn(f_a[i], p.scale);
#endif
      }
      store_vec(p.o + out[k] * OUT_BYTES, f_a);
    }
  }
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
#define PAIR_KERNEL(NAME, UNROLL, ROWS, SPECULATE)                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)                         \
  NAME(const char* o_a, const float* lse_a, const char* o_b, const float* lse_b, char* o,       \
       float* lse, i64 num_tokens, i64 num_heads, i64 num_prefix, const float* scale_ptr,       \
       double scale STRIDE_PARAMS) {                                                            \
    float divisor = OUT_TYPE == 3 && scale_ptr ? *scale_ptr : (float)scale;                     \
    merge_pair<UNROLL, ROWS, SPECULATE>(Pair{o_a, lse_a, o_b, lse_b, o, lse, (u32)num_tokens,   \
                                             (u32)num_heads, num_prefix, divisor STRIDE_ARGS}); \
  }

PAIR_KERNEL(merge_pair_small, SMALL_UNROLL, SMALL_ROWS, true)
PAIR_KERNEL(merge_pair_large, LARGE_UNROLL, LARGE_ROWS, false)

#else
// ---- n states --------------------------------------------------------------------------------

constexpr int CHUNK = 16;   // states whose weights are in shared memory at a time
constexpr int IN_FLIGHT = 4;  // states a thread loads before it uses the first

struct Many {
#if SEPARATE
  const char* const* o; const float* const* lse;  // of each state
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

// Peak x and sum y of exp(lse - x) over a set of states; the union of two sets.
__device__ __forceinline__ float2 join(float2 a, float2 b) {
  float peak = fmaxf(a.x, b.x);
  if (peak == -INF) return make_float2(peak, a.y + b.y);
  return make_float2(peak, a.y * expf(a.x - peak) + b.y * expf(b.x - peak));
}

#if TILE_TOKENS || STRIDED
#define COUNT_TOKEN token
#else
#define COUNT_TOKEN (row / p.num_heads)
#endif

// SPLIT groups of threads share the states of a row; 1 where there are rows enough.
template <int SPLIT, int ROWS>
__device__ __forceinline__ void merge_many(const Many& p) {
  using Rows = Tile<ROWS>;
  constexpr int SIZE = Rows::SIZE, TOTAL = SIZE * VECTORS;
  constexpr int REACH = THREADS / SPLIT;   // vectors that one pass over the states covers
  constexpr int GROUPS = THREADS / SIZE;   // threads that share a row's LSEs
  __shared__ float2 sums[GROUPS * SIZE];
  __shared__ u32 row_counts[SIZE];
  __shared__ u32 longest;
  __shared__ float weights[CHUNK * SIZE];
  __shared__ float partial[SPLIT > 1 ? (SPLIT - 1) * REACH * WIDTH : 1];
  const Rows rows(p.num_tokens, p.num_heads);
  const int tid = threadIdx.x;
  u32 row, token, head;

  // The peak and sum of each row, in GROUPS strands joined as a tree.
  const int slot = Rows::lse_slot(tid % SIZE), group = tid / SIZE;
  if (tid == 0) longest = 0;
  __syncthreads();
  if (group < GROUPS) {
    float2 sum = make_float2(-INF, 0.f);
    bool valid = rows.find(slot, row, token, head);
    u32 count = valid ? p.count(COUNT_TOKEN) : 0;
    i64 offset = valid ? row_offset(row, token, head, p.s_lse, 1) : 0;
    for (u32 j = group; j < count; j += GROUPS) {
      float lse = load_lse(p.state_lse(j) + offset);
      if (lse != -INF) sum = join(sum, make_float2(lse != lse ? -INF : lse, lse != lse ? lse : 1.f));
    }
    sums[group * SIZE + slot] = sum;
    if (group == 0) {
      row_counts[slot] = count;
      atomicMax(&longest, count);
    }
  }
  __syncthreads();
#pragma unroll
  for (int step = 128; step > 0; step /= 2) {
    if (step >= GROUPS) continue;
    if (group < step && group + step < GROUPS) {
      float2& mine = sums[group * SIZE + slot];
      mine = join(mine, sums[(group + step) * SIZE + slot]);
    }
    __syncthreads();
  }

  const int split = tid / REACH;
  for (int base = 0; base < TOTAL; base += REACH) {
    const int index = base + tid % REACH, r = index / VECTORS;
    bool valid = split < SPLIT && index < TOTAL && rows.find(r, row, token, head);
    i64 column = index % VECTORS * WIDTH;
    i64 offset = valid ? (row_offset(row, token, head, p.s_o, HEAD_DIM) + column) * IN_BYTES : 0;
    i64 target = valid ? (row_offset(row, token, head, p.s_out, HEAD_DIM) + column) * OUT_BYTES : 0;
    float acc[WIDTH] = {};
    for (u32 first = 0; first < longest; first += CHUNK) {
      __syncthreads();  // the weights of the chunk before are used up
      for (int i = tid; i < CHUNK * SIZE; i += THREADS) {
        int s = Rows::lse_slot(i % SIZE);
        u32 j = first + i / SIZE, w_row, w_token, w_head;
        float w = 0.f;
        if (j < row_counts[s]) {
          rows.find(s, w_row, w_token, w_head);
          float2 sum = sums[s];
          float lse = load_lse(p.state_lse(j) + row_offset(w_row, w_token, w_head, p.s_lse, 1));
          float peak = sum.x == -INF ? 0.f : sum.x;
          w = sum.y == 0.f ? 0.f : expf(lse - peak) / sum.y;
        }
        weights[i / SIZE * SIZE + s] = w;
      }
      __syncthreads();
      if (!valid) continue;
      u32 left = longest - first;
      for (u32 k = split; k < CHUNK && k < left; k += SPLIT * IN_FLIGHT) {
        Vec v[IN_FLIGHT];
        float w[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
          u32 state = k + i * SPLIT;
          w[i] = state < CHUNK ? weights[state * SIZE + r] : 0.f;
          v[i] = Vec{0, 0, 0, 0};
          if (w[i] != 0.f) v[i] = load_vec(p.state_o(first + state) + offset);
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
          float f[WIDTH];
          unpack(v[i], f);
#pragma unroll
          for (int e = 0; e < WIDTH; ++e) acc[e] = fmaf(w[i], f[e], acc[e]);
        }
      }
    }
    if (SPLIT > 1) {
      __syncthreads();
      if (valid && split > 0)
        for (int e = 0; e < WIDTH; ++e) partial[((split - 1) * WIDTH + e) * REACH + tid % REACH] = acc[e];
      __syncthreads();
      if (valid && split == 0)
        for (int s = 0; s < SPLIT - 1; ++s)
          for (int e = 0; e < WIDTH; ++e) acc[e] += partial[(s * WIDTH + e) * REACH + tid];
    }
    if (valid && split == 0) store_vec(p.out + target, acc);
  }

  // Last, since an LSE may be merged in place and was read twice.
  __syncthreads();
  if (tid < SIZE && rows.find(slot, row, token, head)) {
    float2 sum = sums[slot];
    float peak = sum.x == -INF ? 0.f : sum.x;
    p.out_lse[row_offset(row, token, head, p.s_out_lse, 1)] = peak + logf(sum.y);
  }
}

#if SEPARATE
#define STATE_PARAMS                                                                          \
  const char *o0, const char *o1, const char *o2, const char *o3, const char *o4,             \
      const char *o5, const char *o6, const char *o7, const float *l0, const float *l1,       \
      const float *l2, const float *l3, const float *l4, const float *l5, const float *l6,    \
      const float *l7
#define STATE_ARRAYS                                          \
  __shared__ const char* os[8];                               \
  __shared__ const float* lses[8];                            \
  if (threadIdx.x == 0) {                                     \
    os[0] = o0; os[1] = o1; os[2] = o2; os[3] = o3;           \
    os[4] = o4; os[5] = o5; os[6] = o6; os[7] = o7;           \
    lses[0] = l0; lses[1] = l1; lses[2] = l2; lses[3] = l3;   \
    lses[4] = l4; lses[5] = l5; lses[6] = l6; lses[7] = l7;   \
  }
#define STATE_ARGS os, lses
#else
#define STATE_PARAMS const char *o, i64 o_n, const float *lse, i64 lse_n
#define STATE_ARRAYS
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

#define MANY_KERNEL(NAME, SPLIT, ROWS)                                                          \
  extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)                         \
  NAME(STATE_PARAMS, const void* counts, char* out, float* out_lse, i64 num_states,             \
       i64 num_tokens, i64 num_heads STRIDE_PARAMS) {                                           \
    STATE_ARRAYS                                                                                \
    merge_many<SPLIT, ROWS>(Many{STATE_ARGS, counts, out, out_lse, (u32)num_states,         \
                                 (u32)num_tokens, (u32)num_heads STRIDE_ARGS});                 \
  }

MANY_KERNEL(merge_many_long, LONG_SPLIT, LONG_ROWS)
MANY_KERNEL(merge_many_wide, 1, WIDE_ROWS)
#endif
