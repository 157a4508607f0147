// What a whole round needs beside arithmetic: rows found and kept by tables that are read when the call
// runs, and a list of calls run as one. Included by native.cpp, inside its namespace.

// ids [n] → out [n, size]
template <class T> void embed(const Int* ids, const T* table, T* out, Int n, Int size) {
  for (Int r = 0; r < n; r++) std::memcpy(out + r * size, table + ids[r] * size, size_t(size) * sizeof(T));
}

// cos and sin [batch, tokens, size] of position × frequency, in float32 as the reference has them.
template <class T>
void rotary(const Int* start, const float* frequencies, T* cos, T* sin, Int batch, Int tokens, Int size) {
  for (Int r = 0; r < batch * tokens; r++)
    for (Int i = 0; i < size; i++) {
      const float angle = float(start[r / tokens] + r % tokens) * frequencies[i];
      cos[r * size + i] = std::cos(angle), sin[r * size + i] = std::sin(angle);
    }
}

// The window before the next row, from pool [.., room, size], then the new rows: [batch, width - 1 + tokens, size].
template <class T>
void conv_rows(const T* pool, Int room, const Int* slots, const Int* accepted, const T* rows, Int stride, T* out,
               Int batch, Int tokens, Int before, Int size) {
  for (Int b = 0; b < batch; b++) {
    const T* window = pool + (slots[b] * room + accepted[b]) * size;
    std::memcpy(out, window, size_t(before * size) * sizeof(T));
    out += before * size;
    for (Int t = 0; t < tokens; t++, out += size)
      std::memcpy(out, rows + (b * tokens + t) * stride, size_t(size) * sizeof(T));
  }
}

// pool [.., room, size] at [slots[b], which[b] - 1]; at [slots[b], 0] without ``which``.
template <class T>
void read_rows(const T* pool, Int room, const Int* slots, const Int* which, T* out, Int batch, Int size) {
  for (Int b = 0; b < batch; b++)
    std::memcpy(out + b * size, pool + (slots[b] * room + (which ? which[b] - 1 : 0)) * size,
                size_t(size) * sizeof(T));
}

// rows [batch, size] to the front of pool [.., room], a row a slot.
template <class T> void write_rows(T* pool, Int room, const Int* slots, const T* rows, Int batch, Int size) {
  for (Int b = 0; b < batch; b++)
    std::memcpy(pool + slots[b] * room, rows + b * size, size_t(size) * sizeof(T));
}

// The checkpoints with each sequence's accepted rows folded in: what ``gated_delta`` gives for these rows.
// Pools: state [.., heads, key, value]; k, v [.., room, heads, ..], g, beta [.., room, heads].
template <class T>
void replay(const T* state, const T* k, const T* v, const T* g, const T* beta, Int room, const Int* slots,
            const Int* accepted, T* out, Int batch, Int heads, Int key, Int value) {
  const Int size = heads * key * value;
  for (Int b = 0; b < batch; b++, out += size) {
    const Int at = slots[b] * room * heads;
    if (!accepted[b]) {
      std::memcpy(out, state + slots[b] * size, size_t(size) * sizeof(T));
      continue;
    }
    gated_delta<T, false>(nullptr, k + at * key, v + at * value, g + at, beta + at, state + slots[b] * size, size,
                          nullptr, nullptr, out, 1, accepted[b], heads, key, value);
  }
}

// a [rows, n] beside b [rows, n] → [rows, 2·n]; without b a copy of a.
template <class T> void beside(const T* a, const T* b, T* out, Int rows, Int n) {
  for (Int r = 0; r < rows; r++) {
    std::memcpy(out, a + r * n, size_t(n) * sizeof(T)), out += n;
    if (b) std::memcpy(out, b + r * n, size_t(n) * sizeof(T)), out += n;
  }
}

// ---- a list of calls ---------------------------------------------------------------------------------
// Any function above, taking its arguments from an array of 64-bit words.
template <class A> A word(Int x) {
  if constexpr (std::is_pointer_v<A>) return reinterpret_cast<A>(x);
  else if constexpr (std::is_same_v<A, double>) { double d; std::memcpy(&d, &x, sizeof d); return d; }
  else return A(x);
}
template <auto F> struct Words;
template <class R, class... A, R (*F)(A...)> struct Words<F> {
  template <size_t... I> static Int apply(const Int* x, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<R>) return F(word<A>(x[I])...), 0;
    else return F(word<A>(x[I])...);
  }
  static Int call(const Int* x) { return apply(x, std::index_sequence_for<A...>{}); }
};

// tape: (function, number of arguments, arguments …) × calls. Returns the first result that is not 0.
Int play(const Int* tape, Int calls) {
  Int worst = 0;
  for (Int i = 0; i < calls; i++, tape += 2 + tape[1]) {
    const Int result = reinterpret_cast<Int (*)(const Int*)>(tape[0])(tape + 2);
    if (result && !worst) worst = result;
  }
  return worst;
}
