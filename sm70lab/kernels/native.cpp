// CPU kernels for few rows: verify rounds of a handful of rows, drafts of one. Compiled by native.py.
// Two properties hold everywhere:
//   * A weight, a cached key or a state is read from memory once for all rows of a call.
//   * A row's result depends on that row alone. Every sum runs in one written order, fixed by the shape
//     of a row: never by how many rows there are, by a row's place among them, or by the thread count.
//     So products and sums are written as fma() where they are to be fused, and the compiler must not
//     fuse others (-ffp-contract=off), which it might do in one instance of a template and not in another.
// Matrices are row-major; "stride" is the distance between rows in elements.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __x86_64__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define BYTES 64
#define MM(name) _mm512_##name
#elif defined(__AVX__)
#define BYTES 32
#define MM(name) _mm256_##name
#else
#define BYTES 16
#define MM(name) _mm_##name
#endif

namespace {
using Int = int64_t;

// ---- vectors of one register -------------------------------------------------------------------------
typedef float vf __attribute__((vector_size(BYTES)));
typedef double vd __attribute__((vector_size(BYTES)));
typedef int32_t vi __attribute__((vector_size(BYTES)));

template <class T> struct Register;
template <> struct Register<float> {
  using V = vf;
  typedef float Quarter __attribute__((vector_size(16)));
  typedef int8_t Bytes __attribute__((vector_size(BYTES / 4)));  // as many int8 and int32 as lanes
  typedef int32_t Ints __attribute__((vector_size(BYTES)));
};
template <> struct Register<double> {
  using V = vd;
  typedef double Quarter __attribute__((vector_size(16)));
  typedef int8_t Bytes __attribute__((vector_size(BYTES / 8)));
  typedef int32_t Ints __attribute__((vector_size(BYTES / 2)));
};
template <class T> using Vec = typename Register<T>::V;
template <class T> constexpr int LANES = BYTES / int(sizeof(T));

// Rows whose four sums each stay in registers together: 6 × 4 of 32 with AVX-512, else 2 × 4 of 16.
constexpr int ROWS = BYTES == 64 ? 6 : 2;
// A loop that must be unrolled, so that arrays of registers are registers.
#define EACH(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < n; i++)

// The four functions below take a register or, for what remains beside whole registers, one number.
template <class V, class T> inline V load(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V, class T> inline void store(T* p, V v) { std::memcpy(p, &v, sizeof v); }
template <class V, class T> inline V splat(T x) { return x - V{}; }  // x − 0 is x, −0 too

#if defined(__FMA__) && (BYTES == 64 || BYTES == 32)
inline vf fma(vf a, vf b, vf c) { return MM(fmadd_ps)(a, b, c); }
inline vd fma(vd a, vd b, vd c) { return MM(fmadd_pd)(a, b, c); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
template <class V> inline V fma(V a, V b, V c) { return a * b + c; }
#endif

// The first ``count`` lanes, zeros behind.
template <class T> inline Vec<T> load_some(const T* p, int count) {
  if (count == LANES<T>) return load<Vec<T>>(p);
  Vec<T> v{};
  for (int i = 0; i < count; i++) v[i] = p[i];
  return v;
}
template <class T> inline void store_some(T* p, Vec<T> v, int count) {
  if (count == LANES<T>) return store(p, v);
  for (int i = 0; i < count; i++) p[i] = v[i];
}
// Calls body(i, count) for each register of n numbers; count is short in the last one.
template <class T, class F> inline void registers(Int n, F&& body) {
  Int i = 0;
  for (; i + LANES<T> <= n; i += LANES<T>) body(i, LANES<T>);
  if (i < n) body(i, int(n - i));
}
// Calls body(column, a unit, how many of them) with compile-time blocks: 4 registers, 1 register, 1 number.
template <class T, class F> inline void column_blocks(Int n, F&& body) {
  Int i = 0;
  for (; i + 4 * LANES<T> <= n; i += 4 * LANES<T>) body(i, Vec<T>{}, std::integral_constant<int, 4>{});
  for (; i + LANES<T> <= n; i += LANES<T>) body(i, Vec<T>{}, std::integral_constant<int, 1>{});
  for (; i < n; i++) body(i, T{}, std::integral_constant<int, 1>{});
}

// All lanes in one, by halves: down to 16 bytes, then to one number.
template <class T, class F> inline typename Register<T>::Quarter fold16(Vec<T> v, F&& combine) {
  typename Register<T>::Quarter part[BYTES / 16];
  std::memcpy(part, &v, BYTES);
  for (int w = BYTES / 32; w; w /= 2)
    for (int i = 0; i < w; i++) part[i] = combine(part[i], part[i + w]);
  return part[0];
}
template <class T, class F> inline T fold(Vec<T> v, F&& combine) {
  T x[16 / sizeof(T)];
  store(x, fold16<T>(v, combine));
  for (int w = 8 / sizeof(T); w; w /= 2)
    for (int i = 0; i < w; i++) x[i] = combine(x[i], x[i + w]);
  return x[0];
}
constexpr auto PLUS = [](auto x, auto y) { return x + y; };
constexpr auto GREATER = [](auto x, auto y) { return x > y ? x : y; };
template <class T> inline T sum(Vec<T> v) { return fold<T>(v, PLUS); }
template <class T> inline void sum4(const Vec<T>* a, T* out) { EACH(i, 4) out[i] = sum<T>(a[i]); }
#ifdef __x86_64__  // a quarter of the shuffles
template <> inline void sum4<float>(const vf* a, float* out) {
  const vf ab = MM(unpacklo_ps)(a[0], a[1]) + MM(unpackhi_ps)(a[0], a[1]);
  const vf cd = MM(unpacklo_ps)(a[2], a[3]) + MM(unpackhi_ps)(a[2], a[3]);
  const vf abcd = MM(shuffle_ps)(ab, cd, 0x44) + MM(shuffle_ps)(ab, cd, 0xEE);  // a b c d in each 16 bytes
  store(out, fold16<float>(abcd, PLUS));
}
#endif

// e^x to 2 ulp, 0 below the smallest normal number: x = n·ln 2 + r, a polynomial in r (Cephes expf), · 2^n.
inline vf exponential(vf x) {
  const vi tiny = x < -87.33f;
  vf t = tiny ? splat<vf>(-87.33f) : x;
  t = t > 89.0f ? splat<vf>(89.0f) : t;
  const vf n = fma(t, splat<vf>(1.44269504f), splat<vf>(12582912.0f)) - 12582912.0f;  // to the nearest
  const vf r = fma(n, splat<vf>(2.12194440e-4f), fma(n, splat<vf>(-0.693359375f), t));
  vf p = splat<vf>(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, r, splat<vf>(c));
  p = fma(p, r * r, r) + 1.0f;
  // 2^n as two factors: 2^128 itself is no float, yet e^88.6 is.
  const vi whole = __builtin_convertvector(n, vi), half = whole >> 1;
  p = p * (vf)((half + 127) << 23) * (vf)((whole - half + 127) << 23);
  return tiny ? vf{} : p;
}
inline vd exponential(vd x) {
  for (int i = 0; i < LANES<double>; i++) x[i] = std::exp(x[i]);
  return x;
}
template <class V> inline V silu(V x) { return x / (1 + exponential(-x)); }
template <class V> inline V sigmoid(V x) { return 1 / (1 + exponential(-x)); }

template <class T> T sum_of_squares(const T* x, Int n) {
  Vec<T> total{};
  registers<T>(n, [&](Int i, int count) {
    const Vec<T> v = load_some(x + i, count);
    total = fma(v, v, total);
  });
  return sum<T>(total);
}

// ---- threads -----------------------------------------------------------------------------------------
int threads = 1;

// body(first, last) over [0, items), cut at multiples of ``grain``. ``work`` (numbers read) keeps small
// calls on one thread. Nobody's order of operations may depend on the cut.
template <class F> void split(Int items, Int grain, Int work, F&& body) {
#ifdef _OPENMP
  const Int blocks = (items + grain - 1) / grain;
  const int team = int(std::min<Int>({threads, blocks, 1 + work / 32768}));
  if (team > 1) {
#pragma omp parallel num_threads(team)
    {
      const Int i = omp_get_thread_num(), n = omp_get_num_threads();
      body(std::min(items, blocks * i / n * grain), std::min(items, blocks * (i + 1) / n * grain));
    }
    return;
  }
#endif
  body(Int(0), items);
}

template <class T> T* scratch(size_t size) {  // one piece a thread, kept between calls
  static thread_local std::vector<T> memory;
  if (memory.size() < size) memory.resize(size);
  return memory.data();
}

// ---- products ----------------------------------------------------------------------------------------
template <class T> inline Vec<T> weights(const T* p) { return load<Vec<T>>(p); }
template <class T> inline Vec<T> weights(const int8_t* p) {
  using R = Register<T>;
  const typename R::Bytes bytes = load<typename R::Bytes>(p);
#if BYTES == 64  // gcc converts int8 lane by lane when it is not told
  if constexpr (sizeof(T) == 4) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(p)));
#endif
  return __builtin_convertvector(__builtin_convertvector(bytes, typename R::Ints), typename R::V);
}

// out[r·out_stride + j] = x_r · w_j for R rows and four vectors w: each a sum in LANES parts, then over the lanes.
// Meanwhile the memory ``ahead`` bytes on is fetched, where the next four vectors will be wanted.
template <class T, int R, class W>
__attribute__((noinline)) void dots(const T* x, Int stride, const W* const* w, Int size, Int ahead, T* out,
                                    Int out_stride) {
  Vec<T> total[R][4];
  EACH(r, R) EACH(j, 4) total[r][j] = Vec<T>{};
  Int i = 0;
  for (; i + LANES<T> <= size; i += LANES<T>) {
    Vec<T> u[4];
    EACH(j, 4) {
      u[j] = weights<T>(w[j] + i);
      __builtin_prefetch((const char*)(w[j] + i) + ahead);
    }
    EACH(r, R) {
      const Vec<T> v = load<Vec<T>>(x + r * stride + i);
      EACH(j, 4) total[r][j] = fma(v, u[j], total[r][j]);
    }
  }
  if (i < size) {
    const int count = int(size - i);
    Vec<T> u[4] = {};
    for (int j = 0; j < 4; j++)
      for (int e = 0; e < count; e++) u[j][e] = T(w[j][i + e]);
    EACH(r, R) {
      const Vec<T> v = load_some(x + r * stride + i, count);
      EACH(j, 4) total[r][j] = fma(v, u[j], total[r][j]);
    }
  }
  EACH(r, R) sum4<T>(total[r], out + r * out_stride);
}

// body(r, R) with R a compile-time number: the rows in as few groups of at most ROWS as will do.
template <class F, int R = ROWS> inline void with_rows(int count, Int r, F& body) {
  if constexpr (R > 1)
    if (count < R) return with_rows<F, R - 1>(count, r, body);
  body(r, std::integral_constant<int, R>{});
}
template <class F> inline void row_groups(Int rows, F&& body) {
  const Int groups = (rows + ROWS - 1) / ROWS;
  for (Int g = 0; g < groups; g++) {
    const Int r = rows * g / groups;
    with_rows(int(rows * (g + 1) / groups - r), r, body);
  }
}

// put(r, n, x_r · w_n) for n in [first, last); first is a multiple of four.
template <class T, class W, class F>
void product(const T* x, Int stride, Int rows, const W* w, Int size, Int first, Int last, F&& put) {
  for (Int n = first; n < last; n += 4) {
    const W* four[4];
    for (int j = 0; j < 4; j++) four[j] = w + std::min(n + j, last - 1) * size;
    row_groups(rows, [&](Int r, auto count) {
      T out[count()][4];
      dots<T, count()>(x + r * stride, stride, four, size, 4 * size * Int(sizeof(W)), out[0], 4);
      for (int i = 0; i < count(); i++)
        for (int j = 0; j < 4 && n + j < last; j++) put(r + i, n + j, out[i][j]);
    });
  }
}

// residual + x · wᵀ · scale + bias; the last three may be absent.
template <class T, class W>
void linear(const T* x, Int stride, Int rows, const W* w, const T* scale, const T* bias, const T* residual,
            Int residual_stride, T* out, Int n, Int k) {
  split(n, 4, n * k * Int(sizeof(W)) / 4, [&](Int first, Int last) {
    product(x, stride, rows, w, k, first, last, [&](Int r, Int i, T y) {
      if (scale) y *= scale[i];
      if (bias) y += bias[i];
      if (residual) y += residual[r * residual_stride + i];
      out[r * n + i] = y;
    });
  });
}

// residual + down · (silu(gate · x) ⊙ (up · x)); gate over up in ``gate_up`` [2·inner, hidden].
template <class T>
void swiglu(const T* x, Int stride, Int rows, const T* gate_up, const T* down, const T* residual,
            Int residual_stride, T* out, Int hidden, Int inner, Int out_size) {
  T* gate = scratch<T>(size_t(2 * rows * inner));
  T* up = gate + rows * inner;
  split(inner, 4, 2 * inner * hidden, [&](Int first, Int last) {
    product(x, stride, rows, gate_up, hidden, first, last,
            [&](Int r, Int i, T y) { gate[r * inner + i] = y; });
    product(x, stride, rows, gate_up + inner * hidden, hidden, first, last,
            [&](Int r, Int i, T y) { up[r * inner + i] = y; });
    for (Int r = 0; r < rows; r++)
      registers<T>(last - first, [&](Int i, int count) {
        T* g = gate + r * inner + first + i;
        store_some(g, silu(load_some(g, count)) * load_some(up + r * inner + first + i, count), count);
      });
  });
  const T* none = nullptr;
  linear(gate, inner, rows, down, none, none, residual, residual_stride, out, out_size, inner);
}

// ---- norms -------------------------------------------------------------------------------------------
// x / √(mean(x²) + eps) · weight of one row.
template <class T> inline void norm_row(const T* x, const T* weight, double eps, T* out, Int n) {
  const Vec<T> factor = splat<Vec<T>>(T(1) / std::sqrt(sum_of_squares(x, n) / T(n) + T(eps)));
  registers<T>(n, [&](Int i, int count) {
    store_some(out + i, load_some(x + i, count) * factor * load_some(weight + i, count), count);
  });
}

template <class T>
void rms_norm(const T* x, Int stride, Int rows, const T* weight, double eps, T* out, Int n) {
  for (Int r = 0; r < rows; r++) norm_row(x + r * stride, weight, eps, out + r * n, n);
}

// norm(o) · silu(gate); o [rows, heads, n], gate [rows, heads · n] with a row stride.
template <class T>
void gated_rms_norm(const T* o, const T* gate, Int stride, Int rows, Int heads, const T* weight, double eps,
                    T* out, Int n) {
  for (Int r = 0; r < rows; r++)
    for (Int h = 0; h < heads; h++) {
      const T* z = gate + r * stride + h * n;
      T* y = out + (r * heads + h) * n;
      norm_row(o + (r * heads + h) * n, weight, eps, y, n);
      registers<T>(n, [&](Int i, int count) {
        store_some(y + i, load_some(y + i, count) * silu(load_some(z + i, count)), count);
      });
    }
}

// ---- Gated DeltaNet ----------------------------------------------------------------------------------
// Causal convolution, SiLU, L2 norm of q and k, gating: the rows that the recurrence takes.
// conv_rows [batch, width − 1 + tokens, C], C = q | k | v; outputs [batch, tokens, value heads, ...].
template <class T>
void gdn_rows(const T* conv_rows, const T* conv_weight, const T* a, Int a_stride, const T* b, Int b_stride,
              const T* rate, const T* dt_bias, T* q, T* k, T* v, T* g, T* beta, Int batch, Int tokens,
              Int width, Int key_heads, Int value_heads, Int key, Int value) {
  const Int keys = key_heads * key, size = 2 * keys + value_heads * value, ratio = value_heads / key_heads;
  const Vec<T> scale = splat<Vec<T>>(T(1) / std::sqrt(T(key)));
  T* row = scratch<T>(size_t(size));
  for (Int r = 0; r < batch * tokens; r++) {
    const T* in = conv_rows + (r + r / tokens * (width - 1)) * size;
    registers<T>(size, [&](Int i, int count) {
      Vec<T> total = load_some(in + i, count) * load_some(conv_weight + i, count);
      for (Int j = 1; j < width; j++)
        total = fma(load_some(in + j * size + i, count), load_some(conv_weight + j * size + i, count), total);
      store_some(row + i, silu(total), count);
    });
    for (Int h = 0; h < value_heads; h++)
      for (int is_key = 0; is_key < 2; is_key++) {
        const T* x = row + is_key * keys + h / ratio * key;
        const Vec<T> factor = splat<Vec<T>>(T(1) / std::sqrt(sum_of_squares(x, key) + T(1e-6)));
        registers<T>(key, [&](Int i, int count) {
          const Vec<T> unit = load_some(x + i, count) * factor;
          store_some((is_key ? k : q) + (r * value_heads + h) * key + i, is_key ? unit : unit * scale, count);
        });
      }
    std::memcpy(v + r * value_heads * value, row + 2 * keys, size_t(value_heads * value) * sizeof(T));
    for (Int h = 0; h < value_heads; h++) {
      const T x = a[r * a_stride + h] + dt_bias[h];
      g[r * value_heads + h] = rate[h] * (x > T(20) ? x : std::log1p(std::exp(x)));
      beta[r * value_heads + h] = T(1) / (T(1) + std::exp(-b[r * b_stride + h]));
    }
  }
}

// One token on N registers of columns of one head's state: S' = αS + k⊗d, d = β(v − αSᵀk), o = S'ᵀq.
template <class T, class V, int N, bool OUT>
inline void delta_step(const T* q, const T* k, const T* v, T decay, T beta, const T* from, T* to, T* o,
                       Int key, Int stride) {
  constexpr int L = sizeof(V) / sizeof(T);
  V total[2][N];  // two chains, as one alone would wait for its own additions
  EACH(u, 2) EACH(c, N) total[u][c] = V{};
  for (Int i = 0; i < key; i += 2)
    EACH(u, 2) if (u == 0 || i + 1 < key) {
      const V x = splat<V>(k[i + u]);
      EACH(c, N) total[u][c] = fma(load<V>(from + (i + u) * stride + c * L), x, total[u][c]);
    }
  V d[N];
  EACH(c, N) {
    d[c] = beta * (load<V>(v + c * L) - decay * (total[0][c] + total[1][c]));
    total[0][c] = total[1][c] = V{};
  }
  for (Int i = 0; i < key; i += 2)
    EACH(u, 2) if (u == 0 || i + 1 < key) {
      const V x = splat<V>(k[i + u]);
      EACH(c, N) {
        const V s = fma(x, d[c], decay * load<V>(from + (i + u) * stride + c * L));
        store(to + (i + u) * stride + c * L, s);
        if constexpr (OUT) total[u][c] = fma(s, splat<V>(q[i + u]), total[u][c]);
      }
    }
  if constexpr (OUT) EACH(c, N) store(o + c * L, total[0][c] + total[1][c]);
}

// q (with o, or neither), k [batch, tokens, heads, key], v, o [.., value], g, beta [batch, tokens, heads].
// Goes to ``states`` [batch, tokens, heads, key, value] after every token, or to ``last`` after the last.
template <class T, bool OUT>
void gated_delta(const T* q, const T* k, const T* v, const T* g, const T* beta, const T* state,
                 Int state_stride, T* o, T* states, T* last, Int batch, Int tokens, Int heads, Int key,
                 Int value) {
  const Int size = key * value;
  split(batch * heads, 1, batch * tokens * heads * size, [&](Int first, Int end) {
    T* own = states || last ? nullptr : scratch<T>(size_t(size));
    for (Int n = first; n < end; n++) {
      const Int b = n / heads, h = n % heads;
      column_blocks<T>(value, [&](Int c, auto unit, auto count) {
        const T* from = state + b * state_stride + h * size + c;
        for (Int t = 0; t < tokens; t++) {
          const Int r = (b * tokens + t) * heads + h;
          T* to = (states ? states + r * size : last ? last + n * size : own) + c;
          delta_step<T, decltype(unit), count(), OUT>(q + r * key, k + r * key, v + r * value + c,
                                                      std::exp(g[r]), beta[r], from, to, o + r * value + c,
                                                      key, value);
          from = to;
        }
      });
    }
  });
}

#include "native_attention.h"

// ---- top k -------------------------------------------------------------------------------------------
// The k greatest of each row in falling order; of equals the lower id. One pass beside a sorted list.
template <class T>
void top_k(const T* x, Int stride, Int rows, Int size, Int k, T* values, Int* ids) {
  for (Int r = 0; r < rows; r++, x += stride, values += k, ids += k) {
    const auto insert = [&](Int i, Int end) {  // values[end] falls out
      for (; end > 0 && values[end - 1] < x[i]; end--)
        values[end] = values[end - 1], ids[end] = ids[end - 1];
      values[end] = x[i], ids[end] = i;
    };
    for (Int i = 0; i < k; i++) insert(i, i);
    constexpr Int SPAN = 2 * LANES<T>;  // skipped at once, unless one of them belongs in the list
    for (Int i = k; i < size; i += SPAN) {
      if (i + SPAN <= size) {
        const Vec<T> one = load<Vec<T>>(x + i), other = load<Vec<T>>(x + i + LANES<T>);
        if (!(fold<T>(GREATER(one, other), GREATER) > values[k - 1])) continue;
      }
      for (Int j = i; j < std::min(i + SPAN, size); j++)
        if (x[j] > values[k - 1]) insert(j, k - 1);
    }
  }
}

#include "native_memory.h"
}  // namespace

// The tables that native.py reads, in the order of its SIGNATURES: each function, then as ``Words``.
#define EACH_FUNCTION(T, DO)                                                                               \
  DO((linear<T, T>)), DO((linear<T, int8_t>)), DO((swiglu<T>)), DO((rms_norm<T>)), DO((gated_rms_norm<T>)), \
      DO((gdn_rows<T>)), DO((gated_delta<T, true>)), DO((gated_delta<T, false>)), DO((gated_attention<T>)), \
      DO((top_k<T>)), DO((embed<T>)), DO((rotary<T>)), DO((conv_rows<T>)), DO((read_rows<T>)),             \
      DO((write_rows<T>)), DO((replay<T>)), DO((beside<T>))
#define PLAIN(F) (void*)(&F)
#define TAPED(F) (void*)&Words<&F>::call
extern "C" {
void* functions_float32[] = {EACH_FUNCTION(float, PLAIN)};
void* functions_float64[] = {EACH_FUNCTION(double, PLAIN)};
void* taped_float32[] = {EACH_FUNCTION(float, TAPED)};
void* taped_float64[] = {EACH_FUNCTION(double, TAPED)};
void set_threads(Int n) { threads = int(n); }
Int play_tape(const Int* tape, Int calls) { return play(tape, calls); }
}
