// Causal TSSA about means, or with decays that come from the data. As in causal_tssa.h, with a decay a[n] for every token:
//
//   c[n] = a c[n-1] + w^2        e[n,h] = k[n,h] sum_d q w^2 / max(c, 1e-12) + D bias[n,h]       pi = softmax_h(t e)
//   A[n] = a A[n-1] + pi w w^T   M[n] = a M[n-1] + pi     m = M + 1e-8    y = -pi m (m I + A)^{-1} w
//
// where q[n] = a q[n-1] + 1 is the number of tokens where it is a sum, and 1 otherwise. About means
//
//   U[n] = a U[n-1] + pi w       v = U / m                y = -pi m (m I + A - m v v^T)^{-1} (w - v)
//
// Everything but the softmax is done in tiles, the tokens of a chunk one after the other for the same tile: see lanes.h.
// Chunks run in parallel, replayed from the sums at their starts, and between passes their totals are scanned in order.
#pragma once

#include "causal_tssa.h"
#include "lanes.h"

namespace {

// Where the five sums of one chunk lie, one after the other: squares c [H, D], counts q, products A [H, P], means U [H, D]
// and masses M. Those that a form does not have take no room.
struct SumLayout {
  int64_t counts, products, means, masses, size;
};

// Registers of one thread: tiles of features and of products for one token, and what is kept of `rows` tokens.
template <class V>
struct FlowWork {
  V *x, *o, *t, *U, *mean, *bar, *W, *left, *F, *C;  // one token
  V *u, *z, *direct, *of_tokens, *means, *products;  // rows of them
  V *gain, *mass, *shift, *dmass, *masses;           // rows of single registers

  FlowWork(V* memory, int64_t g, int64_t pairs, int64_t rows, int64_t histories) {
    const auto take = [&](int64_t count) {
      V* const part = memory;
      memory += count;
      return part;
    };
    x = take(g), o = take(g), t = take(g), U = take(g), mean = take(g), bar = take(g);
    W = take(pairs), left = take(pairs), F = take(pairs), C = take(pairs);
    u = take(rows * g), z = take(rows * g), direct = take(rows * g), of_tokens = take(rows * g);
    gain = take(rows), mass = take(rows), shift = take(rows), dmass = take(rows), masses = take(rows);
    means = take(histories * g), products = take(histories * pairs);
  }
  static int64_t count(int64_t g, int64_t pairs, int64_t rows, int64_t histories) {
    return (6 + 4 * rows + histories) * g + (4 + histories) * pairs + 5 * rows;
  }
};

template <class B>
class Flow {
 public:
  using S = typename B::Scalar;
  using V = Lanes<S>;
  using Tile = typename B::Tile;
  using Work = FlowWork<V>;

  Flow(const Shape& shape, const tost::Form& form, const void* w, const void* decay)
      : blocks(shape.H, shape.D, form.block_size),
        own(blocks, form.channel_decay),
        centered(form.centered),
        counted(form.count_scaled && form.token_decay),
        H(shape.H),
        HD(shape.H * shape.D),
        HP(shape.H * blocks.width),
        w_(static_cast<const S*>(w)),
        decay_(static_cast<const S*>(decay)) {
    sums.counts = HD;
    sums.products = sums.counts + (counted ? own.count : 0);
    sums.means = sums.products + HP;
    sums.masses = sums.means + (centered ? HD : 0);
    sums.size = sums.masses + own.count;
  }

  const B blocks;
  const Own<B> own;
  const bool centered, counted;
  const int64_t H, HD, HP;
  SumLayout sums;

  // By how much sums fade over a chunk; kept [own.count].
  void fade_over(const Chunk& chunk, double* kept) const {
    for (int64_t i = 0; i < own.count; ++i) kept[i] = 1;
    for (int k = 0; k < chunk.rows.count; ++k) {
      const S* const row = decay_ + chunk.row(k) * own.count;
#pragma omp simd
      for (int64_t i = 0; i < own.count; ++i) kept[i] *= double(row[i]);
    }
  }

  // The squares and counts of a chunk alone, at their places in `out`.
  void sum_squares(const Chunk& chunk, const Work& work, S* out) const {
    for_each_tile([&](const Tile& tile) {
      V q = {};
      fill_zero(work.U, blocks.size());
      for (int k = 0; k < chunk.rows.count; ++k) add_squares(tile, chunk.row(k), work, q);
      blocks.store_features(tile, work.U, out);
      if (counted) own.store(tile, q, out + sums.counts);
    });
  }

  // energy [rows, H], without scale and bias.
  void energies(const Chunk& chunk, const Work& work, const S* start, S* energy) const {
    fill_zero(energy, chunk.rows.count * H);
    for_each_tile([&](const Tile& tile) {
      V q = load_squares(tile, work, start);
      for (int k = 0; k < chunk.rows.count; ++k) {
        add_squares(tile, chunk.row(k), work, q);
        const V share = shares(work.x, work.U, work.t);
        collect<S>(tile, counted ? share * q : share, energy + k * H);
      }
    });
  }

  // The products, means and masses of a chunk alone; weight [rows, H] holds pi.
  void sum_weighted(const Chunk& chunk, const Work& work, const S* weight, S* out) const {
    for_each_tile([&](const Tile& tile) {
      V M = {};
      fill_zero(work.W, blocks.pairs);
      fill_zero(work.U, blocks.size());
      for (int k = 0; k < chunk.rows.count; ++k)
        add_weighted(tile, chunk.row(k), tile.spread(weight + k * H), work, M);
      blocks.store_products(tile, work.W, out + sums.products);
      if (centered) blocks.store_features(tile, work.U, out + sums.means);
      own.store(tile, M, out + sums.masses);
    });
  }

  void shrink(const Chunk& chunk, const Work& work, const S* pi, const S* start, S* y) const {
    for_each_tile([&](const Tile& tile) {
      V M = load_weighted(tile, work, start);
      for (int k = 0; k < chunk.rows.count; ++k) {
        const int64_t n = chunk.row(k);
        const V p = tile.spread(pi + n * H);
        const V m = advance(tile, n, p, work, M).mass;
        blocks.solve(work.F, work.x);
        scale_by<V>(-p * m, work.x, blocks.size());
        blocks.store_features(tile, work.x, y + n * HD);
      }
    });
  }

  // What the outputs of a chunk add to the gradients of the products, means and masses at its start.
  void reach_weighted(const Chunk& chunk, const Work& work, const S* o, const S* pi, const S* start, S* out) const {
    const int64_t g = blocks.size();
    fill_zero(out + sums.masses, own.count);
    for_each_tile([&](const Tile& tile) {
      V M = load_weighted(tile, work, start), kept = V{} + S(1), total = {};
      fill_zero(work.C, blocks.pairs);
      fill_zero(work.bar, g);
      for (int k = 0; k < chunk.rows.count; ++k) {
        const int64_t n = chunk.row(k);
        const V p = tile.spread(pi + n * H);
        const Token token = advance(tile, n, p, work, M);
        if (decay_) kept *= own.load(tile, decay_ + n * own.count);
        const Gradients gradients = through(tile, o + n * HD, p, token, work, work.x, work.o, work.t);
        blocks.add_symmetric(kept * gradients.gain, work.x, work.o, work.C);
        if (centered)
          for (int64_t i = 0; i < g; ++i) work.bar[i] += kept * work.t[i];
        total += kept * gradients.mass;
      }
      blocks.store_products(tile, work.C, out + sums.products);
      if (centered) blocks.store_features(tile, work.bar, out + sums.means);
      own.add(tile, total, out + sums.masses);
    });
  }

  // With the gradients `later` of the sums after the chunk: the slopes of the memberships [rows, H], the part of dw that
  // does not come from memberships, and in ddecay the gradient of the decays through these sums.
  void descend_weighted(const Chunk& chunk, const Work& work, const S* o, const S* pi, const S* start, const S* later,
                        S* slopes, S* dw, S* ddecay) const {
    const int64_t g = blocks.size(), pairs = blocks.pairs;
    const int count = chunk.rows.count;
    fill_zero(slopes, count * H);
    for_each_tile([&](const Tile& tile) {
      V M = load_weighted(tile, work, start);
      for (int k = 0; k < count; ++k) {
        const int64_t n = chunk.row(k);
        const V p = tile.spread(pi + n * H);
        if (ddecay) {
          work.masses[k] = M;
          std::copy(work.W, work.W + pairs, work.products + k * pairs);
          if (centered) std::copy(work.U, work.U + g, work.means + k * g);
        }
        const Token token = advance(tile, n, p, work, M);
        V *const u = work.u + k * g, *const z = work.z + k * g;
        std::copy(work.x, work.x + g, u);
        const Gradients gradients = through(tile, o + n * HD, p, token, work, u, z, work.direct + k * g);
        work.mass[k] = token.mass, work.gain[k] = gradients.gain;
        work.dmass[k] = gradients.mass, work.shift[k] = gradients.shift;
      }
      blocks.load_products(tile, later + sums.products, work.C);
      fill_zero(work.bar, g);
      if (centered) blocks.load_features(tile, later + sums.means, work.bar);
      V bar_mass = own.load_once(tile, later + sums.masses);
      for (int k = count - 1; k >= 0; --k) {
        const int64_t n = chunk.row(k);
        if (decay_ && k < count - 1) {
          const V a = own.load(tile, decay_ + chunk.row(k + 1) * own.count);
          scale_by(a, work.C, pairs);
          scale_by(a, work.bar, g);
          bar_mass *= a;
        }
        const V *const u = work.u + k * g, *const z = work.z + k * g;
        blocks.add_symmetric(work.gain[k], u, z, work.C);
        if (centered)
          for (int64_t i = 0; i < g; ++i) work.bar[i] += work.direct[k * g + i];
        bar_mass += work.dmass[k];
        blocks.load_features(tile, w_ + n * HD, work.x);
        blocks.through_products(work.C, work.x, work.t);
        const V p = tile.spread(pi + n * H), m = work.mass[k];
        V slope = bar_mass + work.shift[k];
        for (int64_t i = 0; i < g; ++i) {
          const V rest = work.bar[i] - m * z[i];
          slope += work.x[i] * (S(0.5) * work.t[i] + rest);
          work.t[i] = p * (work.t[i] + rest);
        }
        collect<S>(tile, slope, slopes + k * H);
        blocks.store_features(tile, work.t, dw + n * HD);
        if (!ddecay) continue;
        V da = blocks.dot(work.C, work.products + k * pairs, pairs) + bar_mass * work.masses[k];
        if (centered) da += blocks.dot(work.bar, work.means + k * g, g);
        own.add(tile, da, ddecay + n * own.count);
      }
    });
  }

  // What the energies of a chunk add to the gradients of the squares and counts at its start, and energy as above; dn
  // [rows, H] are the gradients of the energies before the bias.
  void reach_squares(const Chunk& chunk, const Work& work, const S* dn, const S* start, S* energy, S* out) const {
    const int64_t g = blocks.size();
    fill_zero(energy, chunk.rows.count * H);
    if (counted) fill_zero(out + sums.counts, own.count);
    for_each_tile([&](const Tile& tile) {
      V q = load_squares(tile, work, start), kept = V{} + S(1), total = {};
      fill_zero(work.bar, g);
      for (int k = 0; k < chunk.rows.count; ++k) {
        const int64_t n = chunk.row(k);
        add_squares(tile, n, work, q);
        if (decay_) kept *= own.load(tile, decay_ + n * own.count);
        const V d = tile.spread(dn + k * H), share = shares(work.x, work.U, work.t);
        collect<S>(tile, counted ? share * q : share, energy + k * H);
        total += kept * d * share;
        const V faded = kept * (counted ? d * q : d);
        for (int64_t i = 0; i < g; ++i) work.bar[i] -= faded * to_square(work.x[i], work.U[i], work.t[i]);
      }
      blocks.store_features(tile, work.bar, out);
      if (counted) own.add(tile, total, out + sums.counts);
    });
  }

  // With the gradients `later` of the sums after the chunk: dw, to which the part in `partial` is added, and the rest of
  // ddecay.
  void descend_squares(const Chunk& chunk, const Work& work, const S* dn, const S* start, const S* later,
                       const S* partial, S* dw, S* ddecay) const {
    const int64_t g = blocks.size();
    const int count = chunk.rows.count;
    for_each_tile([&](const Tile& tile) {
      V q = load_squares(tile, work, start);
      for (int k = 0; k < count; ++k) {
        work.masses[k] = q;
        std::copy(work.U, work.U + g, work.of_tokens + k * g);
        add_squares(tile, chunk.row(k), work, q);
        work.mass[k] = q;
        std::copy(work.U, work.U + g, work.u + k * g);
      }
      blocks.load_features(tile, later, work.bar);
      V bar_count = counted ? own.load_once(tile, later + sums.counts) : V{};
      for (int k = count - 1; k >= 0; --k) {
        const int64_t n = chunk.row(k);
        if (decay_ && k < count - 1) {
          const V a = own.load(tile, decay_ + chunk.row(k + 1) * own.count);
          scale_by(a, work.bar, g);
          bar_count *= a;
        }
        blocks.load_features(tile, w_ + n * HD, work.x);
        blocks.load_features(tile, partial + n * HD, work.o);
        const V *const c = work.u + k * g, d = tile.spread(dn + k * H), dq = counted ? d * work.mass[k] : d;
        bar_count += d * shares(work.x, c, work.t);
        for (int64_t i = 0; i < g; ++i) {
          work.bar[i] -= dq * to_square(work.x[i], c[i], work.t[i]);
          work.o[i] += S(2) * work.x[i] * (dq * work.t[i] + work.bar[i]);
        }
        blocks.store_features(tile, work.o, dw + n * HD);
        if (!ddecay) continue;
        V da = blocks.dot(work.bar, work.of_tokens + k * g, g);
        if (counted) da += bar_count * work.masses[k];
        own.add(tile, da, ddecay + n * own.count);
      }
    });
  }

 private:
  // A token: m, and 1 where gradients reach the products about the mean.
  struct Token {
    V mass, held;
  };
  // What a token's output adds to the gradients of the sums up to it: gain (u z^T + z u^T) to A and `mass` to M. shift is
  // what the mean adds to the slope of its membership.
  struct Gradients {
    V gain, mass, shift;
  };

  const S *const w_, *const decay_;

  template <class Each>
  void for_each_tile(Each each) const {
    for (int64_t index = 0; index < blocks.tiles; ++index) each(Tile(blocks, index));
  }

  // Sums of squares are kept in work.U. Returns the count.
  V load_squares(const Tile& tile, const Work& work, const S* start) const {
    blocks.load_features(tile, start, work.U);
    return counted ? own.load(tile, start + sums.counts) : V{};
  }
  // Adds the n-th token to them, after they have faded; work.x is the token.
  void add_squares(const Tile& tile, int64_t n, const Work& work, V& q) const {
    blocks.load_features(tile, w_ + n * HD, work.x);
    if (decay_) {
      const V a = own.load(tile, decay_ + n * own.count);
      scale_by(a, work.U, blocks.size());
      q *= a;
    }
    for (int64_t i = 0; i < blocks.size(); ++i) work.U[i] += work.x[i] * work.x[i];
    q += S(1);
  }
  // The sum of x^2 / max(c, floor) over a block, and the inverses.
  V shares(const V* x, const V* c, V* inverse) const {
    V sum = {};
    for (int64_t i = 0; i < blocks.size(); ++i) {
      const V floor = V{} + S(kPrefixFloor);
      inverse[i] = S(1) / (c[i] > floor ? c[i] : floor);
      sum += x[i] * x[i] * inverse[i];
    }
    return sum;
  }
  // The slope of a share in c, up to its sign.
  static V to_square(const V& x, const V& c, const V& inverse) {
    return c > V{} + S(kPrefixFloor) ? (x * inverse) * (x * inverse) : V{};
  }

  V load_weighted(const Tile& tile, const Work& work, const S* start) const {
    blocks.load_products(tile, start + sums.products, work.W);
    if (centered) blocks.load_features(tile, start + sums.means, work.U);
    return own.load(tile, start + sums.masses);
  }
  void add_weighted(const Tile& tile, int64_t n, const V& p, const Work& work, V& M) const {
    blocks.load_features(tile, w_ + n * HD, work.x);
    if (decay_) {
      const V a = own.load(tile, decay_ + n * own.count);
      scale_by(a, work.W, blocks.pairs);
      if (centered) scale_by(a, work.U, blocks.size());
      M *= a;
    }
    blocks.add_products(p, work.x, work.W);
    if (centered)
      for (int64_t i = 0; i < blocks.size(); ++i) work.U[i] += p * work.x[i];
    M += p;
  }
  // Adds the n-th token and finds the factors F of m I + W, with the products about the mean in work.left; work.x is what
  // the token has beyond the mean.
  Token advance(const Tile& tile, int64_t n, const V& p, const Work& work, V& M) const {
    add_weighted(tile, n, p, work, M);
    Token token = {M + S(kMassFloor), V{} + S(1)};
    if (centered) {
      const V inverse = S(1) / token.mass;
      for (int64_t i = 0; i < blocks.size(); ++i) {
        work.mean[i] = work.U[i] * inverse;
        work.x[i] -= work.mean[i];
      }
      token.held = center(blocks, token.mass, work.mean, work.W, work.left);
    }
    blocks.factor(token.mass, centered ? work.left : work.W, work.W, work.F);
    return token;
  }
  // u comes as the token after `advance` and becomes (m I + W)^{-1} u; z = (m I + W)^{-1} o; direct is the gradient of U.
  Gradients through(const Tile& tile, const S* o, const V& p, const Token& token, const Work& work, V* u, V* z,
                    V* direct) const {
    const int64_t g = blocks.size();
    blocks.load_features(tile, o, z);
    blocks.solve(work.F, u);
    blocks.solve(work.F, z);
    const V gain = p * token.mass * token.held;
    V to_mass = -p * token.held * blocks.form(u, centered ? work.left : work.W, z), shift = {};
    if (centered) {
      const V along_u = blocks.dot(u, work.mean, g), along_z = blocks.dot(z, work.mean, g);
      to_mass += along_z * (gain * along_u - p);
      shift = token.mass * along_z;
      for (int64_t i = 0; i < g; ++i) direct[i] = p * z[i] - gain * (u[i] * along_z + z[i] * along_u);
    }
    return {gain, to_mass, shift};
  }
};

// One of the sums of all chunks, or their gradients: `width` numbers per head, at `offset` in rows of `row` numbers per
// head of the state, and which of the head's decays each belongs to.
struct Column {
  int64_t width, row, offset;
  const int32_t* place;  // null for the first
};

// As carry_over_chunks in fading.h: kept [items, H, each] is by how much each chunk makes the sums fade, null for not at
// all. parts, and the starts that come from them, begin with this sum and are `stride` apart.
template <class S>
inline void carry_over_chunks(const Layout& layout, int64_t H, const Column& column, const double* kept, int64_t each,
                              const S* parts, bool reverse, const S* begin, S* starts, int64_t stride, S* end) {
#pragma omp for schedule(static)
  for (int64_t item = 0; item < layout.sequences * H; ++item) {
    const int64_t b = item / H, h = item % H, at = h * column.width;
    const int64_t state = item * column.row + column.offset;
    const int64_t before = layout.first_chunk(b), after = layout.first_chunk(b + 1);
    for (int64_t first = 0; first < column.width; first += kColumns) {
      const int64_t count = first + kColumns <= column.width ? kColumns : column.width - first;
      double sum[kColumns];
      for (int64_t j = 0; j < count; ++j) sum[j] = begin ? double(begin[state + first + j]) : 0.0;
      for (int64_t i = before; i < after; ++i) {
        const int64_t c = reverse ? before + after - 1 - i : i;
        const double* const own = kept ? kept + (c * H + h) * each : nullptr;
        const S* const part = parts + c * stride + at + first;
        S* const start = starts + c * stride + at + first;
        for (int64_t j = 0; j < count; ++j) {
          const double total = sum[j], fade = own ? own[column.place ? column.place[first + j] : 0] : 1.0;
          sum[j] = fade * total + double(part[j]);
          start[j] = S(total);
        }
      }
      for (int64_t j = 0; j < count; ++j) end[state + first + j] = S(sum[j]);
    }
  }
}

// The columns of the five sums, in their order.
template <class B>
class Columns {
 public:
  using S = typename B::Scalar;

  explicit Columns(const Flow<B>& flow)
      : flow_(flow), features_(flow.blocks.D), products_(flow.blocks.width), blocks_(flow.blocks.per_head) {
    if (failed()) return;
    const int64_t g = flow.blocks.size(), per_head = flow.blocks.per_head;
    for (int64_t d = 0; d < flow.blocks.D; ++d) features_[d] = int32_t(d / g);
    for (int64_t j = 0; j < per_head; ++j) blocks_[j] = int32_t(j);
    for (int64_t apart = 0, next = 0; apart < g; ++apart)
      for (int64_t j = 0; j < per_head; ++j)
        for (int64_t i = 0; i < g - apart; ++i) products_[next++] = int32_t(j);
  }
  bool failed() const { return features_.failed() || products_.failed() || blocks_.failed(); }

  // Carries the squares and counts, or the products, means and masses, of all chunks on; begin may be null.
  void carry_squares(const Layout& layout, const double* kept, const S* parts, bool reverse, const S* begin, S* starts,
                     S* end) const {
    const int64_t D = flow_.blocks.D, each = flow_.own.each, row = D + (flow_.counted ? each : 0);
    carry(layout, {D, row, 0, place(features_)}, kept, parts, 0, reverse, begin, starts, end);
    if (flow_.counted)
      carry(layout, {each, row, D, place(blocks_)}, kept, parts, flow_.sums.counts, reverse, begin, starts, end);
  }
  void carry_weighted(const Layout& layout, const double* kept, const S* parts, bool reverse, const S* begin,
                      const S* begin_mass, S* starts, S* end, S* end_mass) const {
    const int64_t D = flow_.blocks.D, P = flow_.blocks.width, row = P + (flow_.centered ? D : 0);
    const int64_t each = flow_.own.each;
    carry(layout, {P, row, 0, place(products_)}, kept, parts, flow_.sums.products, reverse, begin, starts, end);
    if (flow_.centered)
      carry(layout, {D, row, P, place(features_)}, kept, parts, flow_.sums.means, reverse, begin, starts, end);
    carry(layout, {each, each, 0, place(blocks_)}, kept, parts, flow_.sums.masses, reverse, begin_mass, starts,
          end_mass);
  }

 private:
  const int32_t* place(const Buffer<int32_t>& table) const { return flow_.own.apart ? table + 0 : nullptr; }
  void carry(const Layout& layout, const Column& column, const double* kept, const S* parts, int64_t at, bool reverse,
             const S* begin, S* starts, S* end) const {
    carry_over_chunks(layout, flow_.H, column, kept, flow_.own.each, parts + at, reverse, begin, starts + at,
                      flow_.sums.size, end);
  }

  const Flow<B>& flow_;
  const Buffer<int32_t> features_, products_, blocks_;
};

template <class B>
int flow_forward(const tost::CausalForward& call) {
  using S = typename B::Scalar;
  const Shape s = call.shape;
  const Layout layout(s, call.sequences, call.cu_seqlens, tost::kCausalChunk);
  if (!layout.valid()) return tost::kBadSequences;
  const Flow<B> flow(s, call.form, call.w, call.decay);
  const Columns<B> columns(flow);
  const int64_t tokens = s.B * s.N, items = layout.items, H = s.H, HD = flow.HD, stride = flow.sums.size;
  const auto t = static_cast<const S*>(call.temperature), bias = static_cast<const S*>(call.bias);
  const auto scale = static_cast<const S*>(call.scale);
  const auto y = static_cast<S*>(call.y);
  const int threads = useful_threads(call.threads, items, tokens * HD);
  const int64_t per_work = Flow<B>::Work::count(flow.blocks.size(), flow.blocks.pairs, 0, 0);

  Buffer<S> parts(items * stride), scratch(threads * tost::kCausalChunk * H);
  Buffer<double> kepts(call.decay ? items * flow.own.count : 0);
  Buffer<Lanes<S>> works(threads * per_work);
  Buffer<S> own(call.pi ? 0 : tokens * H + items * stride);
  if (layout.failed() || columns.failed() || parts.failed() || scratch.failed() || kepts.failed() || works.failed() ||
      own.failed())
    return tost::kNoMemory;
  S* const pi = call.pi ? static_cast<S*>(call.pi) : own + 0;
  S* const starts = call.pi ? static_cast<S*>(call.starts) : pi + tokens * H;
  double* const kept = call.decay ? kepts + 0 : nullptr;

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    S* const weight = scratch + thread_index() * tost::kCausalChunk * H;
    const typename Flow<B>::Work work(works + thread_index() * per_work, flow.blocks.size(), flow.blocks.pairs, 0, 0);

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      if (kept) flow.fade_over(chunk, kept + item * flow.own.count);
      flow.sum_squares(chunk, work, parts + item * stride);
    }
    columns.carry_squares(layout, kept, parts + 0, false, static_cast<const S*>(call.squares_in), starts,
                          static_cast<S*>(call.squares));

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      S* const out = pi + chunk.token * H;
      flow.energies(chunk, work, starts + item * stride, weight);
      for (int k = 0; k < chunk.rows.count; ++k)
        for (int64_t h = 0; h < H; ++h) {
          S& logit = weight[k * H + h];
          logit *= energy_scale(s, scale, call.scale_stride, chunk, k, h);
          logit = t[h] * (logit + energy_shift(s, bias, call.bias_stride, chunk, k, h));
        }
      softmax_rows(weight, chunk.rows.count, H);
      for_each_masked(chunk.rows, [&](int n) { fill_zero(out + n * H, H); });
      for (int k = 0; k < chunk.rows.count; ++k)
        std::copy(weight + k * H, weight + (k + 1) * H, out + chunk.rows.index[k] * H);
      flow.sum_weighted(chunk, work, weight, parts + item * stride);
    }
    columns.carry_weighted(layout, kept, parts + 0, false, static_cast<const S*>(call.weighted_in),
                           static_cast<const S*>(call.mass_in), starts, static_cast<S*>(call.weighted),
                           static_cast<S*>(call.mass));

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      for_each_masked(chunk.rows, [&](int n) { fill_zero(y + (chunk.token + n) * HD, HD); });
      flow.shrink(chunk, work, pi, starts + item * stride, y);
    }
  }
  return tost::kDone;
}

template <class B>
int flow_backward(const tost::CausalBackward& call) {
  using S = typename B::Scalar;
  const Shape s = call.shape;
  const Layout layout(s, call.sequences, call.cu_seqlens, tost::kCausalChunk);
  if (!layout.valid()) return tost::kBadSequences;
  const Flow<B> flow(s, call.form, call.w, call.decay);
  const Columns<B> columns(flow);
  const int64_t tokens = s.B * s.N, items = layout.items, H = s.H, HD = flow.HD, stride = flow.sums.size;
  const int64_t rows = tost::kCausalChunk, E = flow.own.count;
  const auto t = static_cast<const S*>(call.temperature), bias = static_cast<const S*>(call.bias);
  const auto scale = static_cast<const S*>(call.scale);
  const auto o = static_cast<const S*>(call.dy), pi = static_cast<const S*>(call.pi);
  const auto starts = static_cast<const S*>(call.starts);
  const auto dw = static_cast<S*>(call.dw), dt = static_cast<S*>(call.dtemperature);
  const auto de = static_cast<S*>(call.denergy);
  const auto dscale = scale ? static_cast<S*>(call.dscale) : nullptr;
  const auto ddecay = call.decay ? static_cast<S*>(call.ddecay) : nullptr;
  const int threads = useful_threads(call.threads, items, tokens * HD);
  const int64_t g = flow.blocks.size(), pairs = flow.blocks.pairs, histories = call.decay ? rows : 0;
  const int64_t per_work = Flow<B>::Work::count(g, pairs, rows, histories), per_thread = 2 * rows * H;

  Buffer<S> parts(items * stride), tails(items * stride), scratch(threads * per_thread);
  Buffer<double> kepts(call.decay ? items * E : 0), dt_parts(items * H);
  Buffer<Lanes<S>> works(threads * per_work);
  if (layout.failed() || columns.failed() || parts.failed() || tails.failed() || scratch.failed() || kepts.failed() ||
      dt_parts.failed() || works.failed())
    return tost::kNoMemory;
  double* const kept = call.decay ? kepts + 0 : nullptr;

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    S* const slope = scratch + thread_index() * per_thread;
    S* const energy = slope + rows * H;
    const typename Flow<B>::Work work(works + thread_index() * per_work, g, pairs, rows, histories);

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      if (kept) flow.fade_over(chunk, kept + item * E);
      flow.reach_weighted(chunk, work, o, pi, starts + item * stride, parts + item * stride);
    }
    columns.carry_weighted(layout, kept, parts + 0, true, static_cast<const S*>(call.dweighted),
                           static_cast<const S*>(call.dmass), tails + 0, static_cast<S*>(call.dweighted_in),
                           static_cast<S*>(call.dmass_in));

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      const int count = chunk.rows.count;
      if (ddecay) fill_zero(ddecay + chunk.token * E, chunk.rows.length * E);
      flow.descend_weighted(chunk, work, o, pi, starts + item * stride, tails + item * stride, slope, dw, ddecay);
      for_each_masked(chunk.rows, [&](int n) {
        fill_zero(de + (chunk.token + n) * H, H);
        if (dscale) fill_zero(dscale + (chunk.token + n) * H, H);
      });
      // From here on `slope` is the gradient of the energies before the bias, and pi (dpi - mean) is de / t.
      for (int k = 0; k < count; ++k) {
        const int64_t n = chunk.row(k);
        softmax_backward(slope + k * H, pi + n * H, H);
        std::copy(slope + k * H, slope + (k + 1) * H, de + n * H);
        for (int64_t h = 0; h < H; ++h)
          slope[k * H + h] *= t[h] * energy_scale(s, scale, call.scale_stride, chunk, k, h);
      }
      flow.reach_squares(chunk, work, slope, starts + item * stride, energy, parts + item * stride);
      for (int64_t h = 0; h < H; ++h) {
        double total = 0;
        for (int k = 0; k < count; ++k) {
          const int64_t at = chunk.row(k) * H + h;
          const S e = energy[k * H + h];
          total += de[at] * (energy_scale(s, scale, call.scale_stride, chunk, k, h) * e +
                             energy_shift(s, bias, call.bias_stride, chunk, k, h));
          de[at] *= t[h];
          if (dscale) dscale[at] = de[at] * e;
        }
        dt_parts[item * H + h] = total;
      }
    }
    columns.carry_squares(layout, kept, parts + 0, true, static_cast<const S*>(call.dsquares), tails + 0,
                          static_cast<S*>(call.dsquares_in));

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      for_each_masked(chunk.rows, [&](int n) { fill_zero(dw + (chunk.token + n) * HD, HD); });
      for (int k = 0; k < chunk.rows.count; ++k)
        for (int64_t h = 0; h < H; ++h)
          slope[k * H + h] =
              energy_scale(s, scale, call.scale_stride, chunk, k, h) * de[chunk.row(k) * H + h];
      flow.descend_squares(chunk, work, slope, starts + item * stride, tails + item * stride, dw, dw, ddecay);
    }
#pragma omp for schedule(static)
    for (int64_t h = 0; h < H; ++h) {
      double total = 0;
      for (int64_t item = 0; item < items; ++item) total += dt_parts[item * H + h];
      dt[h] = S(total);
    }
  }
  return tost::kDone;
}

}  // namespace
