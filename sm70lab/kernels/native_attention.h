// Attention over the cache. Included by native.cpp, inside its namespace.

constexpr Int BLOCK = 64;  // positions between two updates of the online softmax, from position 0 on

// RMS norm of one head, then rotary positions on its first ``rotary`` channels, then · scale.
template <class T>
inline void prepare_head(const T* x, const T* weight, double eps, const T* cos, const T* sin, Int rotary,
                         T scale, T* out, Int dim) {
  norm_row(x, weight, eps, out, dim);
  for (Int i = 0, half = rotary / 2; i < half; i++) {
    const T first = out[i], second = out[i + half];
    out[i] = first * cos[i] - second * sin[i];
    out[i + half] = second * cos[i + half] + first * sin[i + half];
  }
  for (Int i = 0; i < dim; i++) out[i] *= scale;
}

// sums[r] = sums[r]·keep[r] + Σ_j p[r][j]·values[j] on N registers of columns, j in rising order.
template <class T, class V, int N, int R>
inline void weigh(const T* p, const T* values, Int ahead, Int count, const T* keep, T* sums, Int dim) {
  constexpr int L = sizeof(V) / sizeof(T);
  V total[R][N];
  EACH(r, R) EACH(c, N) total[r][c] = load<V>(sums + r * dim + c * L) * keep[r];
  for (Int j = 0; j < count; j++) {
    V u[N];
    EACH(c, N) {
      u[c] = load<V>(values + j * dim + c * L);
      __builtin_prefetch((const char*)(values + j * dim + c * L) + ahead);
    }
    EACH(r, R) {
      const V x = splat<V>(p[r * BLOCK + j]);
      EACH(c, N) total[r][c] = fma(x, u[c], total[r][c]);
    }
  }
  EACH(r, R) EACH(c, N) store(sums + r * dim + c * L, total[r][c]);
}

// Raises ``maximum`` by one row's scores of this block; returns how far: what was summed shrinks by e^−that.
template <class T> inline T raise_maximum(T* scores, Int count, T& maximum) {
  for (Int i = count; i < BLOCK; i++) scores[i] = -std::numeric_limits<T>::infinity();
  Vec<T> top = load<Vec<T>>(scores);
  for (Int i = LANES<T>; i < BLOCK; i += LANES<T>) top = GREATER(load<Vec<T>>(scores + i), top);
  const T before = maximum;
  maximum = std::max(maximum, fold<T>(top, GREATER));
  return before - maximum;
}
// Scores → weights; returns their sum.
template <class T> inline T soften(T* scores, T maximum) {
  Vec<T> sums{};
  for (Int i = 0; i < BLOCK; i += LANES<T>) {
    const Vec<T> x = exponential(load<Vec<T>>(scores + i) - maximum);
    store(scores + i, x);
    sums += x;
  }
  return sum<T>(sums);
}

// All rows of one sequence at one key head. q_gate: the ``group`` query heads that read it, [q | gate] each.
template <class T>
void attend(const T* q_gate, Int stride, const T* q_norm, double eps, const T* cos, const T* sin, Int rotary,
            const T* keys, const T* values, Int start, T* out, Int out_stride, Int tokens, Int group,
            Int dim) {
  const Int rows = tokens * group, length = start + tokens;  // row m: token m / group
  T* q = scratch<T>(size_t(rows * (2 * dim + BLOCK + 3)));
  T *sums = q + rows * dim, *scores = sums + rows * dim, *maximum = scores + rows * BLOCK;
  T *total = maximum + rows, *keep = total + rows;
  for (Int m = 0; m < rows; m++)
    prepare_head(q_gate + m / group * stride + m % group * 2 * dim, q_norm, eps, cos + m / group * rotary,
                 sin + m / group * rotary, rotary, T(1) / std::sqrt(T(dim)), q + m * dim, dim);
  std::fill(sums, sums + rows * dim, T(0));
  std::fill(total, total + rows, T(0));
  std::fill(maximum, maximum + rows, -std::numeric_limits<T>::infinity());
  for (Int at = 0; at < length; at += BLOCK) {
    const Int next = (const char*)(keys + BLOCK * dim) - (const char*)values;
    const Int first = std::max<Int>(0, at - start) * group;  // earlier rows see nothing of this block
    const auto seen = [&](Int m) { return std::min(BLOCK, start + m / group + 1 - at); };
    for (Int j = 0; j < std::min(BLOCK, length - at); j += 4) {
      const T* four[4];
      for (int e = 0; e < 4; e++) four[e] = keys + std::min(at + j + e, length - 1) * dim;
      row_groups(rows - first, [&](Int r, auto count) {
        const Int m = first + r, to_values = (const char*)values - (const char*)keys;
        dots<T, count()>(q + m * dim, dim, four, dim, to_values, scores + m * BLOCK + j, BLOCK);
      });
    }
    for (Int m = first; m < rows; m++)
      keep[m] = raise_maximum(scores + m * BLOCK, seen(m), maximum[m]);
    registers<T>(rows - first, [&](Int m, int count) {
      store_some(keep + first + m, exponential(load_some(keep + first + m, count)), count);
    });
    for (Int m = first; m < rows; m++)
      total[m] = total[m] * keep[m] + soften(scores + m * BLOCK, maximum[m]);
    row_groups(rows - first, [&](Int r, auto count) {
      const Int m = first + r, common = seen(m);
      column_blocks<T>(dim, [&](Int c, auto unit, auto n) {
        using V = decltype(unit);
        weigh<T, V, n(), count()>(scores + m * BLOCK, values + at * dim + c, next, common, keep + m,
                                  sums + m * dim + c, dim);
        const T one = 1;
        for (Int i = m + 1; i < m + count(); i++)  // what only later rows see
          if (seen(i) > common)
            weigh<T, V, n(), 1>(scores + i * BLOCK + common, values + (at + common) * dim + c, next,
                                seen(i) - common, &one, sums + i * dim + c, dim);
      });
    });
  }
  for (Int m = 0; m < rows; m++) {
    const T* gate = q_gate + m / group * stride + m % group * 2 * dim + dim;
    T* y = out + m / group * out_stride + m % group * dim;
    registers<T>(dim, [&](Int i, int count) {
      const Vec<T> o = load_some(sums + m * dim + i, count) / total[m];
      store_some(y + i, o * sigmoid(load_some(gate + i, count)), count);
    });
  }
}

// Returns 0, or 1 when a row would be written outside the cache.
template <class T>
Int gated_attention(const T* q_gate, Int q_stride, const T* k, Int k_stride, const T* v, Int v_stride,
                    const T* q_norm, const T* k_norm, double eps, const T* cos, const T* sin, Int rotary,
                    T* keys, T* values, Int slots_held, Int capacity, const Int* slots, const Int* start,
                    T* out, Int batch, Int tokens, Int heads, Int kv_heads, Int dim) {
  const Int group = heads / kv_heads;
  Int work = 0;
  for (Int b = 0; b < batch; b++) {
    if (slots[b] < 0 || slots[b] >= slots_held || start[b] < 0 || start[b] + tokens > capacity) return 1;
    work += 2 * kv_heads * dim * (start[b] + tokens);
  }
  split(batch * kv_heads, 1, work, [&](Int first, Int last) {
    for (Int n = first; n < last; n++) {
      const Int b = n / kv_heads, h = n % kv_heads, row = b * tokens;
      const Int own = (slots[b] * kv_heads + h) * capacity * dim;
      for (Int t = 0; t < tokens; t++) {
        const Int r = row + t, at = (start[b] + t) * dim;
        prepare_head(k + r * k_stride + h * dim, k_norm, eps, cos + r * rotary, sin + r * rotary, rotary,
                     T(1), keys + own + at, dim);
        std::memcpy(values + own + at, v + r * v_stride + h * dim, size_t(dim) * sizeof(T));
      }
      attend(q_gate + row * q_stride + h * group * 2 * dim, q_stride, q_norm, eps, cos + row * rotary,
             sin + row * rotary, rotary, keys + own, values + own, start[b], out + (row * heads + h * group) * dim,
             heads * dim, tokens, group, dim);
    }
  });
  return 0;
}
