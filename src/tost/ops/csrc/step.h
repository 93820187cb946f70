// One token of every sequence through a language model, in one call. Everything is float but the matrices.
//
// A step reads every weight once and computes next to nothing, so what happens between two matrices counts. Threads
// share the rows of each matrix and meet four times per layer. What is as short as a token (norms, convolutions, the
// operator) each thread computes for itself, which is quicker than waiting for another one; the first thread writes the
// new state. No result depends on the number of threads.
#pragma once

#include "barrier.h"
#include "gated.h"
#include "matvec.h"

namespace {

using tost::Step;
using tost::StepLayer;

// Phi(x) = erfc(-x / sqrt 2) / 2 by formula 7.1.26 of Abramowitz and Stegun: within 1e-7, without a branch.
inline float gelu(float x) {
  const float z = std::fabs(x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const float tail = 0.5f * p * t * exp_nonpositive(-z * z);
  return x * (x < 0 ? tail : 1.0f - tail);
}

inline float sigmoid(float x) {
  const float e = exp_nonpositive(-std::fabs(x));
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}

// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, as (1 + tanh a) / 2 = sigmoid(2 a).
inline float gelu_tanh(float x) { return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x)); }

inline void layer_norm(const tost::Norm& norm, const float* x, int64_t C, float* out) {
  float mean = 0, variance = 0;
#pragma omp simd reduction(+ : mean)
  for (int64_t c = 0; c < C; ++c) mean += x[c];
  mean /= float(C);
#pragma omp simd reduction(+ : variance)
  for (int64_t c = 0; c < C; ++c) variance += (x[c] - mean) * (x[c] - mean);
  const float scale = 1.0f / std::sqrt(variance / float(C) + norm.eps);
  for (int64_t c = 0; c < C; ++c) {
    const float y = (x[c] - mean) * scale * norm.weight[c];
    out[c] = norm.bias ? y + norm.bias[c] : y;
  }
}

// What a branch sees of x [B, C]: its norm, and if there is a convolution the tokens in the window. `keep` moves the
// window on.
inline void look(const Step& step, const tost::Norm& norm, const tost::Convolution& conv, const float* x, bool keep,
                 float* u) {
  const int64_t C = step.C, before = conv.width - 1;
  for (int64_t b = 0; b < step.B; ++b) {
    float* const own = u + b * C;
    layer_norm(norm, x + b * C, C, own);
    if (conv.taps == nullptr) continue;
    const float* const window = conv.window_in + b * before * C;
    if (keep) {
      float* const moved = conv.window + b * before * C;
      std::memcpy(moved, window + C, sizeof(float) * (before - 1) * C);
      std::memcpy(moved + (before - 1) * C, own, sizeof(float) * C);
    }
    for (int64_t c = 0; c < C; ++c) own[c] += conv.taps[before * C + c] * own[c];
    for (int64_t k = 0; k < before; ++k)
      for (int64_t c = 0; c < C; ++c) own[c] += conv.taps[k * C + c] * window[k * C + c];
  }
}

// Well mixed bits of a number: two rounds of multiply and shift.
inline uint32_t scramble(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// x as a float: one of its two neighbours, the nearer one more often, such that the mean over `bits` is x.
//
// To the nearest would be wrong here. A sum over a long text is so much larger than what a token adds that small
// contributions would always be rounded away, and after some ten million tokens all of them: the sum would stand still.
inline float round_fairly(double x, uint32_t bits) {
  constexpr uint64_t kBelow = (uint64_t(1) << 29) - 1;  // what a double has more than a float
  uint64_t word;
  std::memcpy(&word, &x, sizeof word);
  word = (word + (bits & kBelow)) & ~kBelow;
  std::memcpy(&x, &word, sizeof word);
  return float(x);
}

// What decides the rounding of new sums. It depends on the position, the layer and the place only: a text is the same in
// any batch.
class Bits {
 public:
  Bits(const Step& step, int64_t index, int64_t b)
      : seed_(scramble(uint32_t(step.position[b]) + scramble(uint32_t(index)))) {}
  uint32_t operator()(int64_t place) const { return scramble(seed_ + uint32_t(place) * 0x9e3779b9u); }

 private:
  const uint32_t seed_;
};

// The largest `of` a layer.
template <class Of>
inline int64_t largest(const Step& step, Of of) {
  int64_t count = 0;
  for (int64_t l = 0; l < step.depth; ++l) count = std::max<int64_t>(count, of(step.layers[l]));
  return count;
}

// Registers of scratch that gated statistics need: a state, a tile of features and one of factors.
inline int64_t tile_scratch(const Step& step) {
  return largest(step, [&](const StepLayer& layer) {
    const int64_t g = layer.block_size;
    return layer.write.weight ? 2 * g + g * (g + 1) : 0;
  });
}

// Gated statistics of one token w [C] of sequence b into y [C]; write [C / g] holds its gates, which become relative to
// the mass. See gated.h and relative_gates in ops/_inputs.py.
template <class B>
inline void mix_gated_in(const Step& step, const StepLayer& layer, int64_t b, const float* w, float* write, bool keep,
                         Lanes<float>* memory, float* y) {
  using V = Lanes<float>;
  const Shape shape = {1, 1, step.H, step.C / step.H};
  const Gated<B> gated(shape, layer.block_size, w, write, nullptr);
  const B& blocks = gated.blocks;
  const int64_t lanes = blocks.lanes, g = gated.g;
  for (int64_t i = 0; i < lanes; ++i) {
    const float before = layer.mass_in[b * lanes + i], mass = (1.0f - write[i]) * before + write[i];
    if (keep) layer.mass[b * lanes + i] = mass;
    const float relative = write[i] / std::max(mass, 1e-20f);
    write[i] = std::min(relative, 1.0f);
  }
  V* const state = memory;
  V *const d = state + gated.state_size(), *const F = d + g;
  for (int64_t index = 0; index < blocks.tiles; ++index) {
    const typename B::Tile tile(blocks, index);
    gated.load_state(tile, b, layer.squares_in, layer.weighted_in, state);
    const V z = gated.gate(tile, 0);
    gated.advance(tile, 0, z, state, d);
    if (keep) gated.store_state(tile, b, state, layer.squares, layer.weighted);
    scale_by<V>(z - 1.0f, d, g);
    blocks.factor(V{} + 1.0f, state + g, state + g, F);
    blocks.solve(F, d);
    blocks.store_features(tile, d, y);
  }
}

TOST_OUTLINE void mix_gated(const Step& step, const StepLayer& layer, int64_t b, const float* w, float* write, bool keep,
                            Lanes<float>* memory, float* y) {
  const int64_t g = layer.block_size;
  if (g == 1) return mix_gated_in<Singles<float>>(step, layer, b, w, write, keep, memory, y);
  if (g == kFastBlock) return mix_gated_in<Blocks<float, kFastBlock>>(step, layer, b, w, write, keep, memory, y);
  mix_gated_in<Blocks<float, 0>>(step, layer, b, w, write, keep, memory, y);
}

// Causal TSSA of one token w [C] of sequence b into y [C]; pi is H numbers of scratch. See causal_tssa.h.
inline void mix(const Step& step, int64_t index, int64_t b, const float* w, bool keep, float* pi, float* y) {
  const StepLayer& layer = step.layers[index];
  const int64_t H = step.H, D = step.C / H, HD = step.C;
  const Bits bits(step, index, b);
  for (int64_t h = 0; h < H; ++h) {
    const float* const squares = layer.squares_in + (b * H + h) * D;
    float energy = 0;
#pragma omp simd reduction(+ : energy)
    for (int64_t d = 0; d < D; ++d) {
      const float xx = w[h * D + d] * w[h * D + d], c = squares[d] + xx;
      energy += xx / (c > float(kPrefixFloor) ? c : float(kPrefixFloor));
    }
    if (layer.bias) energy += float(D) * layer.bias[h * step.bias_length + step.place[b]];
    pi[h] = layer.temperature[h] * energy;
  }
  softmax_rows(pi, 1, H);
  for (int64_t h = 0; h < H; ++h) {
    const float p = pi[h], mass = layer.mass_in[b * H + h] + p;
    const int64_t at = (b * H + h) * D;
    const float inverse = 1.0f / (mass + float(kMassFloor));
    for (int64_t d = 0; d < D; ++d) {
      const float x = w[h * D + d];
      const float moment = (layer.weighted_in[at + d] + p * x * x) * inverse;
      y[h * D + d] = -p * x / (1.0f + moment);
    }
    if (!keep) continue;
    layer.mass[b * H + h] = round_fairly(double(layer.mass_in[b * H + h]) + p, bits(2 * HD + h));
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) {
      const int64_t place = h * D + d;
      const double xx = double(w[place]) * w[place];
      layer.squares[at + d] = round_fairly(double(layer.squares_in[at + d]) + xx, bits(place));
      layer.weighted[at + d] = round_fairly(double(layer.weighted_in[at + d]) + p * xx, bits(HD + place));
    }
  }
}

// y [H, D] over the root mean square of every head, times the weight.
TOST_OUTLINE void norm_heads(const tost::Norm& norm, int64_t H, int64_t D, float* y) {
  for (int64_t h = 0; h < H; ++h) {
    float* const own = y + h * D;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < D; ++d) sum += own[d] * own[d];
    const float scale = 1.0f / std::sqrt(sum / float(D) + norm.eps);
    for (int64_t d = 0; d < D; ++d) own[d] *= scale * norm.weight[h * D + d];
  }
}

// In whole registers, also where the last is not full: a number alone might be rounded otherwise than one among others,
// and how many are left over depends on the number of threads.
inline void activate(float* x, int64_t count, bool tanh) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const size_t bytes = sizeof(float) * std::min<int64_t>(kLanes, count - i);
    float part[kLanes] = {};
    std::memcpy(part, x + i, bytes);
#pragma omp simd
    for (int j = 0; j < kLanes; ++j) part[j] = tanh ? gelu_tanh(part[j]) : gelu(part[j]);
    std::memcpy(x + i, part, bytes);
  }
}

// Meeting costs about as much as reading this many bytes, so each thread should have more of them in between.
template <class W>
inline int step_threads(const Step& step) {
  constexpr int64_t kWorthAThread = 1 << 16;
  int64_t numbers = step.head.rows * step.head.columns;
  for (int64_t l = 0; l < step.depth; ++l) {
    const StepLayer& layer = step.layers[l];
    const tost::Matrix* const matrices[] = {&layer.in,  &layer.write,  &layer.gate,
                                            &layer.out, &layer.mlp_in, &layer.mlp_out};
    for (const tost::Matrix* m : matrices) numbers += m->weight ? m->rows * m->columns : 0;
  }
  const int64_t useful = numbers * int64_t(sizeof(W)) / ((4 * step.depth + 1) * kWorthAThread);
  return int(std::max<int64_t>(1, std::min<int64_t>(useful, step.threads)));
}

template <class W>
int language_step(const Step& step) {
  const int64_t B = step.B, C = step.C, width = B * C, hidden = step.hidden;
  const int threads = step_threads<W>(step);
  const int64_t gates = largest(step, [](const StepLayer& layer) { return layer.write.weight ? layer.write.rows : 0; });
  const int64_t per_thread = 2 * width + step.H + gates, per_work = tile_scratch(step);
  Barrier meeting;
  Buffer<float> shared(2 * width + B * (hidden + gates)), own(threads * per_thread);
  Buffer<Lanes<float>> works(threads * per_work);
  if (shared.failed() || own.failed() || works.failed()) return tost::kNoMemory;
  float *const x = step.x, *const w = shared + 0, *const gate = shared + width, *const m = shared + 2 * width;
  float* const write = m + B * hidden;

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int me = thread_index(), team = team_size();
    const bool first = me == 0;
    float* const u = own + me * per_thread;
    float *const y = u + width, *const pi = y + width, *const relative = pi + step.H;
    for (int64_t l = 0; l < step.depth; ++l) {
      const StepLayer& layer = step.layers[l];
      look(step, layer.norm1, layer.conv, x, first, u);
      multiply<W>(layer.in, u, B, me, team, [&](int64_t b, int64_t row, float value) { w[b * C + row] = value; });
      if (layer.gate.weight)
        multiply<W>(layer.gate, u, B, me, team,
                    [&](int64_t b, int64_t row, float value) { gate[b * C + row] = value * sigmoid(value); });
      const int64_t written = layer.write.weight ? layer.write.rows : 0;
      if (written)
        multiply<W>(layer.write, u, B, me, team,
                    [&](int64_t b, int64_t row, float value) { write[b * written + row] = sigmoid(value); });
      meeting.wait(team);
      for (int64_t b = 0; b < B; ++b) {
        if (written) {
          std::copy(write + b * written, write + (b + 1) * written, relative);
          mix_gated(step, layer, b, w + b * C, relative, first, works + me * per_work, y + b * C);
        } else {
          mix(step, l, b, w + b * C, first, pi, y + b * C);
        }
        if (layer.heads.weight) norm_heads(layer.heads, step.H, C / step.H, y + b * C);
      }
      if (layer.gate.weight)
        for (int64_t i = 0; i < width; ++i) y[i] *= gate[i];
      multiply<W>(layer.out, y, B, me, team, [&](int64_t b, int64_t row, float value) {
        x[b * C + row] += layer.gamma1 ? layer.gamma1[row] * value : value;
      });
      meeting.wait(team);
      look(step, layer.norm2, layer.conv_mlp, x, first, u);
      multiply<W>(layer.mlp_in, u, B, me, team,
                  [&](int64_t b, int64_t row, float value) { m[b * hidden + row] = value; });
      const int64_t begin = first_row(hidden, me, team), end = first_row(hidden, me + 1, team);
      for (int64_t b = 0; b < B; ++b) activate(m + b * hidden + begin, end - begin, layer.tanh);
      meeting.wait(team);
      multiply<W>(layer.mlp_out, m, B, me, team, [&](int64_t b, int64_t row, float value) {
        x[b * C + row] += layer.gamma2 ? layer.gamma2[row] * value : value;
      });
      meeting.wait(team);
    }
    for (int64_t b = 0; b < B; ++b) layer_norm(step.norm, x + b * C, C, u + b * C);
    multiply<W>(step.head, u, B, me, team,
                [&](int64_t b, int64_t row, float value) { step.logits[b * step.head.rows + row] = value; });
  }
  return tost::kDone;
}

}  // namespace
