// Non-causal TSSA about the means of groups. As in tssa.h, with
//
//   U[h,d] = sum_n pi w      v = w - U / m      A[h,b] = sum_n pi v_b v_b^T      y_b = -pi m (m I + A)^{-1} v_b
//
// Products are summed up after the means are known, so that nothing cancels. That is one more pass over w than in tssa.h.
// Statistics are computed in tiles for blocks of any size: see lanes.h.
#pragma once

#include "lanes.h"
#include "tssa.h"

namespace {

// What the backward pass needs of every head: its products, then its D means.
template <class S>
inline void join_heads(int64_t H, int64_t P, int64_t D, const S* products, const S* means, S* out) {
  for (int64_t h = 0; h < H; ++h) {
    std::copy(products + h * P, products + (h + 1) * P, out + h * (P + D));
    std::copy(means + h * D, means + (h + 1) * D, out + h * (P + D) + P);
  }
}
template <class S>
inline void split_heads(int64_t H, int64_t P, int64_t D, const S* joined, S* products, S* means) {
  for (int64_t h = 0; h < H; ++h) {
    std::copy(joined + h * (P + D), joined + h * (P + D) + P, products + h * P);
    std::copy(joined + h * (P + D) + P, joined + (h + 1) * (P + D), means + h * D);
  }
}

// U / m for all heads, in place; each [heads, D] and [heads].
template <class S>
inline void means_of(int64_t heads, int64_t D, const S* mass, S* tokens) {
  for (int64_t i = 0; i < heads * D; ++i) tokens[i] /= mass[i / D] + S(kMassFloor);
}

// sums[h, d] += the sum over the real rows of pi x; weight [tokens, H] holds pi.
template <class S>
inline void add_weighted(const S* x, const Chunk& chunk, int64_t H, int64_t D, const S* weight, S* sums) {
  for (int k = 0; k < chunk.rows.count; ++k) {
    const int64_t n = chunk.row(k);
    for (int64_t h = 0; h < H; ++h) {
      const S p = weight[n * H + h];
      const S* const row = x + (n * H + h) * D;
#pragma omp simd
      for (int64_t d = 0; d < D; ++d) sums[h * D + d] += p * row[d];
    }
  }
}

template <class B>
class CenteredTiles {
 public:
  using S = typename B::Scalar;
  using V = Lanes<S>;
  using Tile = typename B::Tile;
  using Work = BlockWork<S, B::kSize>;

  CenteredTiles(const B& blocks, const S* w, const S* pi) : blocks(blocks), H(blocks.H), HD(H * blocks.D), w_(w), pi_(pi) {}

  const B& blocks;
  const int64_t H, HD;

  // sums [H, width] = the sum over the real rows of pi v_b v_b^T.
  void sum_products(const Chunk& chunk, const Work& work, const S* mean, S* sums) const {
    for_each_tile(work, mean, [&](const Tile& tile, int64_t) {
      fill_zero(work.W, blocks.pairs);
      for (int k = 0; k < chunk.rows.count; ++k) {
        const V p = load(tile, chunk.row(k), work);
        blocks.add_products(p, work.x, work.W);
      }
      blocks.store_products(tile, work.W, sums);
    });
  }

  // y = -pi m (m I + W)^{-1} v.
  void shrink(const Chunk& chunk, const Work& work, const S* mean, const S* mass, const V* factors, S* y) const {
    for_each_tile(work, mean, [&](const Tile& tile, int64_t index) {
      const V m = tile.spread(mass) + S(kMassFloor);
      for (int k = 0; k < chunk.rows.count; ++k) {
        const int64_t n = chunk.row(k);
        const V p = load(tile, n, work);
        blocks.solve(factors + index * blocks.pairs, work.x);
        scale_by<V>(-p * m, work.x, blocks.size());
        blocks.store_features(tile, work.x, y + n * HD);
      }
    });
  }

  // sums [H, width] = the sum over the real rows of pi (o_i v_j + o_j v_i).
  void sum_symmetric(const Chunk& chunk, const Work& work, const S* mean, const S* o, S* sums) const {
    for_each_tile(work, mean, [&](const Tile& tile, int64_t) {
      fill_zero(work.W, blocks.pairs);
      for (int k = 0; k < chunk.rows.count; ++k) {
        const int64_t n = chunk.row(k);
        const V p = load(tile, n, work);
        blocks.load_features(tile, o + n * HD, work.o);
        blocks.add_symmetric(p, work.x, work.o, work.W);
      }
      blocks.store_products(tile, work.W, sums);
    });
  }

  // The gradient of U for one sequence, in the place of sum_n pi o: minus what its outputs would add to all tokens. With
  // dW for the products that is m (m I + W)^{-1} sum_n pi o - 2 dW sum_n pi v, over m, and what is left of the tokens
  // about their mean is the floor of the mass times it.
  void means_of_gradients(const Work& work, const S* mean, const S* mass, const V* factors, const V* reaches,
                          S* sums) const {
    for_each_tile(work, mean, [&](const Tile& tile, int64_t index) {
      const V inverse = S(1) / (tile.spread(mass) + S(kMassFloor));
      blocks.load_features(tile, sums, work.x);
      blocks.solve(factors + index * blocks.pairs, work.x);
      blocks.through_products(reaches + index * blocks.pairs, work.u, work.t);
      for (int64_t i = 0; i < blocks.size(); ++i) work.x[i] -= S(kMassFloor) * inverse * work.t[i];
      blocks.store_features(tile, work.x, sums);
    });
  }

  // slopes [rows, H] of the memberships but for that of the mass, and the part of dw that does not come from them.
  void descend(const Chunk& chunk, const Work& work, const S* mean, const S* dmean, const S* o, const S* mass,
               const V* factors, const V* reaches, S* slopes, S* dw) const {
    fill_zero(slopes, chunk.rows.count * H);
    for_each_tile(work, mean, [&](const Tile& tile, int64_t index) {
      const V m = tile.spread(mass) + S(kMassFloor);
      blocks.load_features(tile, dmean, work.z);
      for (int k = 0; k < chunk.rows.count; ++k) {
        const int64_t n = chunk.row(k);
        const V p = load(tile, n, work);
        blocks.load_features(tile, o + n * HD, work.o);
        blocks.solve(factors + index * blocks.pairs, work.o);
        blocks.through_products(reaches + index * blocks.pairs, work.x, work.t);
        V slope = {};
        for (int64_t i = 0; i < blocks.size(); ++i) {
          const V rest = work.z[i] - m * work.o[i];
          slope += work.x[i] * (S(0.5) * work.t[i] + rest);
          work.t[i] = p * (work.t[i] + rest);
        }
        collect<S>(tile, slope, slopes + k * H);
        blocks.store_features(tile, work.t, dw + n * HD);
      }
    });
  }

 private:
  const S *const w_, *const pi_;

  // Calls each(tile, index), with the mean in work.u.
  template <class Each>
  void for_each_tile(const Work& work, const S* mean, Each each) const {
    for (int64_t index = 0; index < blocks.tiles; ++index) {
      const Tile tile(blocks, index);
      blocks.load_features(tile, mean, work.u);
      each(tile, index);
    }
  }
  // work.x = v for the n-th token; returns its membership.
  V load(const Tile& tile, int64_t n, const Work& work) const {
    blocks.load_features(tile, w_ + n * HD, work.x);
    for (int64_t i = 0; i < blocks.size(); ++i) work.x[i] -= work.u[i];
    return tile.spread(pi_ + n * H);
  }
};

template <class B>
int centered_forward(const tost::Forward& call) {
  using S = typename B::Scalar;
  const Layout layout(call.shape, call.sequences, call.cu_seqlens, tost::kChunk);
  if (!layout.valid()) return tost::kBadSequences;
  const int64_t sequences = call.sequences, tokens = call.shape.B * call.shape.N, items = layout.items;
  const int64_t H = call.shape.H, D = call.shape.D, HD = H * D;
  const auto w = static_cast<const S*>(call.w), t = static_cast<const S*>(call.temperature);
  const auto y = static_cast<S*>(call.y);
  const int threads = useful_threads(call.threads, items, tokens * HD);
  const B blocks(H, D, call.form.block_size);
  const int64_t HP = H * blocks.width, per_sequence = blocks.tiles * blocks.pairs;
  using Tiles = CenteredTiles<B>;
  const int64_t per_thread = HP + HD + tost::kChunk * H, per_work = Tiles::Work::count(blocks, 1);

  Buffer<double> parts(items * HP), token_parts(items * HD), mass_parts(items * H);
  Buffer<S> scale(sequences * HD), scratch(threads * per_thread), sums(sequences * (2 * HD + HP + H));
  Buffer<Lanes<S>> factors(sequences * per_sequence), works(threads * per_work);
  Buffer<S> own(call.pi ? 0 : tokens * H);
  if (layout.failed() || parts.failed() || token_parts.failed() || mass_parts.failed() || scale.failed() ||
      scratch.failed() || sums.failed() || factors.failed() || works.failed() || own.failed())
    return tost::kNoMemory;
  S* const pi = call.pi ? static_cast<S*>(call.pi) : own + 0;
  S* const squares = call.squares ? static_cast<S*>(call.squares) : sums + 0;
  S* const weighted = sums + sequences * HD;
  S* const mean = weighted + sequences * HP;
  S* const mass = call.mass ? static_cast<S*>(call.mass) : mean + sequences * HD;
  const Tiles tiles(blocks, w, pi);

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    S* const sum = scratch + thread_index() * per_thread;
    S *const of_tokens = sum + HP, *const row_pi = of_tokens + HD;
    const typename Tiles::Work work(blocks, works + thread_index() * per_work, 1);

    if (call.form.normalize) {
#pragma omp for schedule(static)
      for (int64_t item = 0; item < items; ++item) {
        const Chunk chunk(layout, call.mask, item);
        fill_zero(of_tokens, HD);
        add_squares(w + chunk.token * HD, chunk.rows, HD, of_tokens);
        widen(of_tokens, HD, token_parts + item * HD);
      }
      total_over_chunks(layout, token_parts + 0, HD, squares);
    }
#pragma omp for schedule(static)
    for (int64_t b = 0; b < sequences; ++b) {
      const S count = energy_scale<S>(call.form, call.mask, layout, b);
      for (int64_t j = b * HD; j < (b + 1) * HD; ++j) {
        if (!call.form.normalize) squares[j] = 0;
        scale[j] = count * (call.form.normalize ? inverse_square_sum(squares[j]) : S(1));
      }
    }

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      const Rows& rows = chunk.rows;
      S* const out = pi + chunk.token * H;
      energies<S, 0>(w + chunk.token * HD, rows, H, D, scale + chunk.b * HD, row_pi);
      for (int k = 0; k < rows.count; ++k)
        for (int64_t h = 0; h < H; ++h) row_pi[k * H + h] *= t[h];
      softmax_rows(row_pi, rows.count, H);
      for (int64_t h = 0; h < H; ++h) mass_parts[item * H + h] = 0;
      for_each_masked(rows, [&](int n) { fill_zero(out + n * H, H); });
      for (int k = 0; k < rows.count; ++k)
        for (int64_t h = 0; h < H; ++h) {
          out[rows.index[k] * H + h] = row_pi[k * H + h];
          mass_parts[item * H + h] += row_pi[k * H + h];
        }
      fill_zero(of_tokens, HD);
      add_weighted(w, chunk, H, D, pi, of_tokens);
      widen(of_tokens, HD, token_parts + item * HD);
    }
    total_over_chunks(layout, mass_parts + 0, H, mass);
    total_over_chunks(layout, token_parts + 0, HD, mean);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < sequences; ++b) means_of(H, D, mass + b * H, mean + b * HD);

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      tiles.sum_products(chunk, work, mean + chunk.b * HD, sum);
      widen(sum, HP, parts + item * HP);
    }
    total_over_chunks(layout, parts + 0, HP, weighted);
    factor_tiles(blocks, work, sequences, mass, weighted, factors + 0);

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      for_each_masked(chunk.rows, [&](int n) { fill_zero(y + (chunk.token + n) * HD, HD); });
      tiles.shrink(chunk, work, mean + chunk.b * HD, mass + chunk.b * H, factors + chunk.b * per_sequence, y);
    }
    if (call.weighted) {
#pragma omp for schedule(static)
      for (int64_t b = 0; b < sequences; ++b)
        join_heads(H, blocks.width, D, weighted + b * HP, mean + b * HD,
                  static_cast<S*>(call.weighted) + b * (HP + HD));
    }
  }
  return tost::kDone;
}

// As tssa_backward with blocks, and what the means add: dU, the same for all tokens of a sequence, to pi (w - U / m) dU.
template <class B>
int centered_backward(const tost::Backward& call) {
  using S = typename B::Scalar;
  const Layout layout(call.shape, call.sequences, call.cu_seqlens, tost::kChunk);
  if (!layout.valid()) return tost::kBadSequences;
  const int64_t sequences = call.sequences, tokens = call.shape.B * call.shape.N, items = layout.items;
  const int64_t H = call.shape.H, D = call.shape.D, HD = H * D;
  const auto w = static_cast<const S*>(call.w), o = static_cast<const S*>(call.dy);
  const auto t = static_cast<const S*>(call.temperature), pi = static_cast<const S*>(call.pi);
  const auto squares = static_cast<const S*>(call.squares), mass = static_cast<const S*>(call.mass);
  const auto dw = static_cast<S*>(call.dw), dt = static_cast<S*>(call.dtemperature);
  const int threads = useful_threads(call.threads, items, tokens * HD);
  const B blocks(H, D, call.form.block_size);
  const int64_t HP = H * blocks.width, per_sequence = blocks.tiles * blocks.pairs;
  using Tiles = CenteredTiles<B>;
  const int64_t per_thread = HP + HD + 2 * tost::kChunk * H, per_work = Tiles::Work::count(blocks, 1);

  Buffer<double> parts(items * HP), token_parts(items * HD), dt_parts(items * H);
  Buffer<S> weighted(sequences * HP), mean(sequences * HD), q(sequences * HD), dA(sequences * HP), dM(sequences * H);
  Buffer<S> dU(sequences * HD), ds(sequences * HD), de(tokens * H), scratch(threads * per_thread);
  Buffer<Lanes<S>> factors(sequences * per_sequence), reaches(sequences * per_sequence), works(threads * per_work);
  if (layout.failed() || parts.failed() || token_parts.failed() || dt_parts.failed() || weighted.failed() ||
      mean.failed() || q.failed() || dA.failed() || dM.failed() || dU.failed() || ds.failed() || de.failed() ||
      scratch.failed() || factors.failed() || reaches.failed() || works.failed())
    return tost::kNoMemory;
  const Tiles tiles(blocks, w, pi);

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    S* const sum = scratch + thread_index() * per_thread;
    S *const of_tokens = sum + HP, *const slopes = of_tokens + HD, *const shares = slopes + tost::kChunk * H;
    const typename Tiles::Work work(blocks, works + thread_index() * per_work, 1);

#pragma omp for schedule(static)
    for (int64_t b = 0; b < sequences; ++b) {
      split_heads(H, blocks.width, D, static_cast<const S*>(call.weighted) + b * (HP + HD), weighted + b * HP,
                 mean + b * HD);
      const S count = energy_scale<S>(call.form, call.mask, layout, b);
      for (int64_t j = b * HD; j < (b + 1) * HD; ++j)
        q[j] = count * (call.form.normalize ? inverse_square_sum(squares[j]) : S(1));
    }
#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      tiles.sum_symmetric(chunk, work, mean + chunk.b * HD, o, sum);
      widen(sum, HP, parts + item * HP);
      fill_zero(of_tokens, HD);
      add_weighted(o, chunk, H, D, pi, of_tokens);
      widen(of_tokens, HD, token_parts + item * HD);
    }
    total_over_chunks(layout, parts + 0, HP, dA + 0);
    total_over_chunks(layout, token_parts + 0, HD, dU + 0);
    factor_tiles(blocks, work, sequences, mass, weighted + 0, factors + 0);
    reach_tiles(blocks, work, sequences, mass, weighted + 0, factors + 0, dA + 0, reaches + 0, dM + 0);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < sequences; ++b)
      tiles.means_of_gradients(work, mean + b * HD, mass + b * H, factors + b * per_sequence,
                               reaches + b * per_sequence, dU + b * HD);

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      const Rows& rows = chunk.rows;
      const int64_t b = chunk.b;
      tiles.descend(chunk, work, mean + b * HD, dU + b * HD, o, mass + b * H, factors + b * per_sequence,
                    reaches + b * per_sequence, slopes, dw);
      energies<S, 0>(w + chunk.token * HD, rows, H, D, q + b * HD, shares);
      fill_zero(of_tokens, HD);
      for (int64_t h = 0; h < H; ++h) dt_parts[item * H + h] = 0;
      for (int k = 0; k < rows.count; ++k) {
        const int64_t n = chunk.row(k);
        S* const slope = slopes + k * H;
        for (int64_t h = 0; h < H; ++h) slope[h] += dM[b * H + h];
        softmax_backward(slope, pi + n * H, H);
        for (int64_t h = 0; h < H; ++h) {
          dt_parts[item * H + h] += slope[h] * shares[k * H + h];
          const S d = t[h] * slope[h];
          de[n * H + h] = d;
          const S* const row = w + n * HD + h * D;
#pragma omp simd
          for (int64_t i = 0; i < D; ++i) of_tokens[h * D + i] += d * (row[i] * row[i]);
        }
      }
      widen(of_tokens, HD, token_parts + item * HD);
    }
    total_over_chunks(layout, token_parts + 0, HD, ds + 0);
#pragma omp for schedule(static)
    for (int64_t j = 0; j < sequences * HD; ++j) {
      const bool flows = call.form.normalize && squares[j] > S(kSquareFloor);
      ds[j] = flows ? -inverse_square_sum(squares[j]) * (q[j] * ds[j]) : S(0);  // q * q may leave the range of float
    }

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      const S *const qb = q + chunk.b * HD, *const dsb = ds + chunk.b * HD;
      for_each_masked(chunk.rows, [&](int n) { fill_zero(dw + (chunk.token + n) * HD, HD); });
      for (int k = 0; k < chunk.rows.count; ++k) {
        const int64_t n = chunk.row(k);
        for (int64_t h = 0; h < H; ++h) {
          const S d = de[n * H + h];
          const int64_t at = n * HD + h * D;
#pragma omp simd
          for (int64_t i = 0; i < D; ++i) dw[at + i] += S(2) * w[at + i] * (d * qb[h * D + i] + dsb[h * D + i]);
        }
      }
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
