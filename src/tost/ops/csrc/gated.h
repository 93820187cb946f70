// Gated statistics: a mean and a covariance of each block of g features over a window that every token widens or shortens.
// With a write gate z[n] for every block, a = 1 - z, and the token w[n]:
//
//   d = w[n] - mean[n-1]      mean[n] = mean[n-1] + z d      S[n] = a (S[n-1] + z d d^T)      y[n] = -(I + S[n])^{-1} a d
//
// where a d = w[n] - mean[n]. S is a covariance for any gates in [0, 1], so nothing cancels. A tile (see block.h) of a
// sequence is one item of parallel work, walked from the first token to the last. The backward pass keeps the state at the
// start of every chunk, and replays a chunk before it walks back through it:
//
//   q = -y, t = -(I + S)^{-1} dy          G -= t q^T, symmetric      dmean -= t
//   h = (G + G^T) d                       dd = z (dmean + a h)       dz = d . dmean + a d.h / 2 - <G, S / a>
//   dw = t + dd                           dmean -= dd                G *= a
#pragma once

#include "block.h"
#include "lanes.h"

namespace {

template <class B>
class Gated {
 public:
  using S = typename B::Scalar;
  using V = Lanes<S>;
  using Tile = typename B::Tile;

  Gated(const Shape& shape, int64_t block_size, const void* w, const void* write, const uint8_t* mask)
      : blocks(shape.H, shape.D, block_size),
        HD(shape.H * shape.D),
        HP(shape.H * blocks.width),
        g(blocks.size()),
        w_(static_cast<const S*>(w)),
        write_(static_cast<const S*>(write)),
        mask_(mask) {}

  const B blocks;
  const int64_t HD, HP, g;

  // Registers of one state: mean and covariance.
  int64_t state_size() const { return g + blocks.pairs; }

  bool is_real(int64_t n) const { return mask_ == nullptr || mask_[n]; }
  const S* tokens() const { return w_; }
  V gate(const Tile& tile, int64_t n) const { return read_lanes<S>(tile, write_ + n * blocks.lanes); }

  // Either may be null for zeros.
  void load_state(const Tile& tile, int64_t b, const S* mean, const S* covariance, V* state) const {
    fill_zero(state, state_size());
    if (mean) blocks.load_features(tile, mean + b * HD, state);
    if (covariance) blocks.load_products(tile, covariance + b * HP, state + g);
  }
  void store_state(const Tile& tile, int64_t b, const V* state, S* mean, S* covariance) const {
    blocks.store_features(tile, state, mean + b * HD);
    blocks.store_products(tile, state + g, covariance + b * HP);
  }

  // Adds the n-th token; d becomes its distance from the mean before it.
  void advance(const Tile& tile, int64_t n, const V& z, V* state, V* d) const {
    blocks.load_features(tile, w_ + n * HD, d);
    for (int64_t i = 0; i < g; ++i) {
      d[i] -= state[i];
      state[i] += z * d[i];
    }
    blocks.add_products(z, d, state + g);
    scale_by<V>(S(1) - z, state + g, blocks.pairs);
  }

 private:
  const S *const w_, *const write_;
  const uint8_t* const mask_;
};

template <class B>
int gated_forward(const tost::GatedForward& call) {
  using S = typename B::Scalar;
  using V = Lanes<S>;
  const Layout layout(call.shape, call.sequences, call.cu_seqlens, call.shape.N + 1);
  if (!layout.valid()) return tost::kBadSequences;
  const Gated<B> gated(call.shape, call.block_size, call.w, call.write, call.mask);
  const B& blocks = gated.blocks;
  const int64_t g = gated.g, HD = gated.HD, items = call.sequences * blocks.tiles;
  const auto y = static_cast<S*>(call.y);
  const int threads = useful_threads(call.threads, items, call.shape.B * call.shape.N * HD);
  const int64_t per_thread = gated.state_size() + g + blocks.pairs;
  Buffer<V> works(threads * per_thread);
  if (layout.failed() || works.failed()) return tost::kNoMemory;

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    V* const state = works + thread_index() * per_thread;
    V *const d = state + gated.state_size(), *const F = d + g;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const int64_t b = item / blocks.tiles;
      const typename B::Tile tile(blocks, item % blocks.tiles);
      gated.load_state(tile, b, static_cast<const S*>(call.mean_in), static_cast<const S*>(call.covariance_in), state);
      for (int64_t n = layout.begin(b); n < layout.end(b); ++n) {
        if (!gated.is_real(n)) {
          fill_zero(d, g);
        } else {
          const V z = gated.gate(tile, n);
          gated.advance(tile, n, z, state, d);
          scale_by<V>(z - S(1), d, g);
          blocks.factor(V{} + S(1), state + g, state + g, F);
          blocks.solve(F, d);
        }
        blocks.store_features(tile, d, y + n * HD);
      }
      gated.store_state(tile, b, state, static_cast<S*>(call.mean_out), static_cast<S*>(call.covariance_out));
    }
  }
  return tost::kDone;
}

template <class B>
int gated_backward(const tost::GatedBackward& call) {
  using S = typename B::Scalar;
  using V = Lanes<S>;
  const Layout layout(call.shape, call.sequences, call.cu_seqlens, call.shape.N + 1);
  if (!layout.valid()) return tost::kBadSequences;
  const Gated<B> gated(call.shape, call.block_size, call.w, call.write, call.mask);
  const B& blocks = gated.blocks;
  const int64_t g = gated.g, pairs = blocks.pairs, HD = gated.HD, items = call.sequences * blocks.tiles;
  const int64_t size = gated.state_size(), rows = tost::kCausalChunk;
  const auto dw = static_cast<S*>(call.dw), dwrite = static_cast<S*>(call.dwrite);
  const int threads = useful_threads(call.threads, items, call.shape.B * call.shape.N * HD);
  int64_t longest = 0;
  for (int64_t b = 0; b < call.sequences; ++b) longest = std::max(longest, layout.end(b) - layout.begin(b));
  const int64_t chunks = (longest + rows - 1) / rows;
  // The states at the starts of chunks, for every token of one chunk the state before it, and single registers.
  const int64_t per_thread = (chunks + rows + 2) * size + 3 * g + 3 * pairs;
  Buffer<V> works(threads * per_thread);
  if (layout.failed() || works.failed()) return tost::kNoMemory;

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    V* const starts = works + thread_index() * per_thread;
    V *const before = starts + chunks * size, *const state = before + rows * size, *const bar = state + size;
    V *const d = bar + size, *const t = d + g, *const h = t + g, *const E = h + g, *const C = E + pairs, *const F = C + pairs;
    V *const dmean = bar, *const G = bar + g;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const int64_t b = item / blocks.tiles, begin = layout.begin(b), end = layout.end(b);
      const typename B::Tile tile(blocks, item % blocks.tiles);
      gated.load_state(tile, b, static_cast<const S*>(call.mean_in), static_cast<const S*>(call.covariance_in), state);
      for (int64_t n = begin; n < end; ++n) {
        if ((n - begin) % rows == 0) std::copy(state, state + size, starts + (n - begin) / rows * size);
        if (gated.is_real(n)) gated.advance(tile, n, gated.gate(tile, n), state, d);
      }
      gated.load_state(tile, b, static_cast<const S*>(call.dmean_out), static_cast<const S*>(call.dcovariance_out), bar);
      for (int64_t last = end; last > begin;) {
        const int64_t chunk = (last - 1 - begin) / rows, first = begin + chunk * rows;
        std::copy(starts + chunk * size, starts + (chunk + 1) * size, state);
        for (int64_t n = first; n < last; ++n) {
          std::copy(state, state + size, before + (n - first) * size);
          if (gated.is_real(n)) gated.advance(tile, n, gated.gate(tile, n), state, d);
        }
        for (int64_t n = last - 1; n >= first; --n) {
          if (!gated.is_real(n)) {
            fill_zero(d, g);
            blocks.store_features(tile, d, dw + n * HD);
            write_lanes<S>(tile, V{}, dwrite + n * blocks.lanes);
            continue;
          }
          const V z = gated.gate(tile, n), a = S(1) - z;
          const V *const mean = before + (n - first) * size, *const covariance = mean + g;
          blocks.load_features(tile, gated.tokens() + n * HD, d);
          for (int64_t i = 0; i < g; ++i) d[i] -= mean[i];
          std::copy(covariance, covariance + pairs, E);
          blocks.add_products(z, d, E);
          for (int64_t i = 0; i < pairs; ++i) C[i] = a * E[i];
          blocks.factor(V{} + S(1), C, C, F);
          blocks.load_features(tile, static_cast<const S*>(call.dy) + n * HD, t);
          blocks.solve(F, t);
          scale_by<V>(V{} - S(1), t, g);
          for (int64_t i = 0; i < g; ++i) dmean[i] -= t[i];
          for (int64_t i = 0; i < g; ++i) h[i] = a * d[i];
          blocks.solve(F, h);
          blocks.add_symmetric(V{} - S(1), t, h, G);
          blocks.through_products(G, d, h);
          V dz = -blocks.dot(G, E, pairs);
          for (int64_t i = 0; i < g; ++i) {
            dz += d[i] * (dmean[i] + S(0.5) * a * h[i]);
            const V dd = z * (dmean[i] + a * h[i]);
            t[i] += dd;
            dmean[i] -= dd;
          }
          scale_by<V>(a, G, pairs);
          blocks.store_features(tile, t, dw + n * HD);
          write_lanes<S>(tile, dz, dwrite + n * blocks.lanes);
        }
        last = first;
      }
      gated.store_state(tile, b, bar, static_cast<S*>(call.dmean_in), static_cast<S*>(call.dcovariance_in));
    }
  }
  return tost::kDone;
}

}  // namespace
