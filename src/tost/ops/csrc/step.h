// One token of every sequence through a language model, in one call. Everything is float but the matrices.
//
// A step reads every weight once and computes next to nothing, so what happens between two matrices counts. Threads
// share the rows of each matrix and meet four times per layer. What is as short as a token (norms, convolutions, the
// operator) each thread computes for itself, which is quicker than waiting for another one; the first thread writes the
// new state. No result depends on the number of threads.
#pragma once

#include "barrier.h"
#include "flow.h"
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

// How many tokens the statistics of a head are taken over: t, or 1 + a + ... + a^(t-1).
inline float count_of(float t, const float* decay, int64_t h) {
  if (decay == nullptr || decay[h] == 1.0f) return t;
  return std::expm1(t * std::log(decay[h])) / (decay[h] - 1.0f);
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

// y = -pi m (m I + W)^{-1} w for the sums after this token; in and out as in `mix`, with H numbers of scratch.
template <int kBlock>
inline void mix_blocks(const Step& step, const StepLayer& layer, int64_t b, const float* w, const float* pi,
                       float* masses, Lanes<float>* memory, float* y) {
  const Blocks<float, kBlock> blocks(step.H, step.C / step.H, layer.form.block_size);
  const BlockWork<float, kBlock> work(blocks, memory);
  for (int64_t h = 0; h < step.H; ++h)
    masses[h] = (layer.decay ? layer.decay[h] : 1.0f) * layer.mass_in[b * step.H + h] + pi[h] + float(kMassFloor);
  const Rows one(nullptr, 0, 1);
  shrink_causally(blocks, work, w, one, pi, masses, layer.weighted_in + b * step.H * blocks.width, layer.decay, y);
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

inline bool has_content(const StepLayer& layer) { return layer.form.centered || layer.form.token_decay; }

// Numbers in the sums of one sequence, as flow.h has them.
inline SumLayout sums_of(const Step& step, const StepLayer& layer) {
  return Flow<Blocks<float, 0>>({1, 1, step.H, step.C / step.H}, layer.form, nullptr, nullptr).sums;
}

// The largest `of` a layer.
template <class Of>
inline int64_t largest(const Step& step, Of of) {
  int64_t count = 0;
  for (int64_t l = 0; l < step.depth; ++l) count = std::max<int64_t>(count, of(step.layers[l]));
  return count;
}

// Registers of scratch that a step needs where statistics are in tiles.
inline int64_t tile_scratch(const Step& step) {
  return largest(step, [&](const StepLayer& layer) {
    const int64_t g = layer.form.block_size;
    if (has_content(layer)) return FlowWork<Lanes<float>>::count(g, g * (g + 1) / 2, 0, 0);
    return g > 1 ? BlockWork<float, 0>::count({step.H, step.C / step.H, g}) : 0;
  });
}

// As `mix`, for statistics about means or with decays from the data, decay [H] or [H, K]: see flow.h. start is
// `sums_of` numbers of scratch.
template <class B>
inline void mix_content(const Step& step, int64_t index, int64_t b, const float* w, const float* decay, bool keep,
                        float* pi, float* start, Lanes<float>* memory, float* y) {
  const StepLayer& layer = step.layers[index];
  const Shape shape = {1, 1, step.H, step.C / step.H};
  const Flow<B> flow(shape, layer.form, w, decay);
  const int64_t H = step.H, D = shape.D, P = flow.blocks.width, g = flow.blocks.size(), K = flow.own.each;
  const int64_t counts = flow.counted ? K : 0, tokens = flow.centered ? D : 0;
  const float* const squares = layer.squares_in + b * H * (D + counts);
  const float* const weighted = layer.weighted_in + b * H * (P + tokens);
  const float* const mass = layer.mass_in + b * H * K;
  for (int64_t h = 0; h < H; ++h) {
    const float *const own = squares + h * (D + counts), *const sums = weighted + h * (P + tokens);
    std::copy(own, own + D, start + h * D);
    std::copy(own + D, own + D + counts, start + flow.sums.counts + h * counts);
    std::copy(sums, sums + P, start + flow.sums.products + h * P);
    std::copy(sums + P, sums + P + tokens, start + flow.sums.means + h * tokens);
  }
  std::copy(mass, mass + H * K, start + flow.sums.masses);
  const typename Flow<B>::Work work(memory, g, flow.blocks.pairs, 0, 0);
  const Layout layout(shape, 1, nullptr, 1);
  const Chunk chunk(layout, nullptr, 0);
  flow.energies(chunk, work, start, pi);
  for (int64_t h = 0; h < H; ++h) {
    if (layer.form.count_scaled && !flow.counted) pi[h] *= count_of(float(step.position[b] + 1), decay, h);
    if (layer.bias) pi[h] += float(D) * layer.bias[h * step.bias_length + step.place[b]];
    pi[h] *= layer.temperature[h];
  }
  softmax_rows(pi, 1, H);
  flow.shrink(chunk, work, pi, start, y);
  if (!keep) return;
  const Bits bits(step, index, b);
  int64_t place = 0;
  for (int64_t h = 0; h < H; ++h) {
    const float* const x = w + h * D;
    const double p = pi[h];
    // The new value of a number in a sum, to which `added` is added, after it has faded with block j.
    const auto next = [&](float before, int64_t j, double added) {
      const double kept = decay ? double(decay[h * K + (K > 1 ? j : 0)]) : 1.0;
      return round_fairly(kept * before + added, bits(place++));
    };
    int64_t at = (b * H + h) * (D + counts);
    for (int64_t d = 0; d < D; ++d, ++at) layer.squares[at] = next(layer.squares_in[at], d / g, double(x[d]) * x[d]);
    for (int64_t j = 0; j < counts; ++j, ++at) layer.squares[at] = next(layer.squares_in[at], j, 1);
    at = (b * H + h) * (P + tokens);
    for (int64_t apart = 0; apart < g; ++apart)  // in the order of block.h
      for (int64_t first = 0; first < D; first += g)
        for (int64_t i = first; i < first + g - apart; ++i, ++at)
          layer.weighted[at] = next(layer.weighted_in[at], first / g, p * (double(x[i]) * x[i + apart]));
    for (int64_t d = 0; d < tokens; ++d, ++at) layer.weighted[at] = next(layer.weighted_in[at], d / g, p * x[d]);
    at = (b * H + h) * K;
    for (int64_t j = 0; j < K; ++j, ++at) layer.mass[at] = next(layer.mass_in[at], j, p);
  }
}

// Causal TSSA of one token w [C] of sequence b into y [C]; pi is 2 H numbers of scratch, memory `tile_scratch`. See
// causal_tssa.h.
inline void mix(const Step& step, int64_t index, int64_t b, const float* w, bool keep, float* pi,
                Lanes<float>* memory, float* y) {
  const StepLayer& layer = step.layers[index];
  const int64_t H = step.H, D = step.C / H, HD = step.C, g = layer.form.block_size;
  const int64_t P = D * (g + 1) / 2;
  const Bits bits(step, index, b);
  for (int64_t h = 0; h < H; ++h) {
    const float fade = layer.decay ? layer.decay[h] : 1.0f;
    const float* const squares = layer.squares_in + (b * H + h) * D;
    float energy = 0;
#pragma omp simd reduction(+ : energy)
    for (int64_t d = 0; d < D; ++d) {
      const float xx = w[h * D + d] * w[h * D + d], c = fade * squares[d] + xx;
      energy += xx / (c > float(kPrefixFloor) ? c : float(kPrefixFloor));
    }
    if (layer.form.count_scaled) energy *= count_of(float(step.position[b] + 1), layer.decay, h);
    if (layer.bias) energy += float(D) * layer.bias[h * step.bias_length + step.place[b]];
    pi[h] = layer.temperature[h] * energy;
  }
  softmax_rows(pi, 1, H);
  if (g == kFastBlock)
    mix_blocks<kFastBlock>(step, layer, b, w, pi, pi + H, memory, y);
  else if (g > 1)
    mix_blocks<0>(step, layer, b, w, pi, pi + H, memory, y);
  for (int64_t h = 0; h < H; ++h) {
    const float fade = layer.decay ? layer.decay[h] : 1.0f, p = pi[h];
    const int64_t at = (b * H + h) * D, products = (b * H + h) * P;
    const float mass = fade * layer.mass_in[b * H + h] + p;
    const float inverse = 1.0f / (mass + float(kMassFloor));
    for (int64_t d = 0; d < (g > 1 ? 0 : D); ++d) {
      const float x = w[h * D + d];
      const float moment = (fade * layer.weighted_in[at + d] + p * x * x) * inverse;
      y[h * D + d] = -p * x / (1.0f + moment);
    }
    if (!keep) continue;
    layer.mass[b * H + h] = round_fairly(double(fade) * layer.mass_in[b * H + h] + p, bits(HD + H * P + h));
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) {
      const int64_t place = h * D + d;
      const double xx = double(w[place]) * w[place];
      layer.squares[at + d] = round_fairly(double(fade) * layer.squares_in[at + d] + xx, bits(place));
      layer.weighted[products + d] =
          round_fairly(double(fade) * layer.weighted_in[products + d] + p * xx, bits(HD + h * P + d));
    }
    int64_t next = D;  // the products of different features, in the order of block.h
    for (int64_t apart = 1; apart < g; ++apart)
      for (int64_t first = h * D; first < (h + 1) * D; first += g, next += g - apart)
#pragma omp simd
        for (int64_t i = 0; i < g - apart; ++i) {
          const double product = double(w[first + i]) * w[first + i + apart];
          layer.weighted[products + next + i] = round_fairly(
              double(fade) * layer.weighted_in[products + next + i] + p * product, bits(HD + h * P + next + i));
        }
  }
}

// Runs mix_content with the blocks of the layer; decay is that of the token, if it has its own. It stays a call, as do the
// norms of heads, so that plain layers are compiled as if there were neither.
TOST_OUTLINE void mix_with_content(const Step& step, int64_t index, int64_t b, const float* w, const float* decay,
                                   bool keep, float* pi, float* start, Lanes<float>* memory, float* y) {
  const StepLayer& layer = step.layers[index];
  const int64_t g = layer.form.block_size;
  decay = layer.form.token_decay ? decay : layer.decay;
  if (g == 1) return mix_content<Singles<float>>(step, index, b, w, decay, keep, pi, start, memory, y);
  if (g == kFastBlock)
    return mix_content<Blocks<float, kFastBlock>>(step, index, b, w, decay, keep, pi, start, memory, y);
  mix_content<Blocks<float, 0>>(step, index, b, w, decay, keep, pi, start, memory, y);
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
    const tost::Matrix* const matrices[] = {&layer.in,  &layer.forget, &layer.gate,
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
  const int64_t decays = largest(step, [](const StepLayer& layer) { return layer.forget.weight ? layer.forget.rows : 0; });
  const int64_t sums = largest(
      step, [&](const StepLayer& layer) { return has_content(layer) ? sums_of(step, layer).size : 0; });
  const int64_t per_thread = 2 * (width + step.H) + sums, per_work = tile_scratch(step);
  Barrier meeting;
  Buffer<float> shared(2 * width + B * (hidden + decays)), own(threads * per_thread);
  Buffer<Lanes<float>> works(threads * per_work);
  if (shared.failed() || own.failed() || works.failed()) return tost::kNoMemory;
  float *const x = step.x, *const w = shared + 0, *const gate = shared + width, *const m = shared + 2 * width;
  float* const decay = m + B * hidden;

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int me = thread_index(), team = team_size();
    const bool first = me == 0;
    float* const u = own + me * per_thread;
    float *const y = u + width, *const pi = y + width, *const start = pi + 2 * step.H;
    for (int64_t l = 0; l < step.depth; ++l) {
      const StepLayer& layer = step.layers[l];
      look(step, layer.norm1, layer.conv, x, first, u);
      multiply<W>(layer.in, u, B, me, team, [&](int64_t b, int64_t row, float value) { w[b * C + row] = value; });
      if (layer.gate.weight)
        multiply<W>(layer.gate, u, B, me, team,
                    [&](int64_t b, int64_t row, float value) { gate[b * C + row] = value * sigmoid(value); });
      const int64_t forgotten = layer.forget.weight ? layer.forget.rows : 0;
      if (forgotten)
        multiply<W>(layer.forget, u, B, me, team,
                    [&](int64_t b, int64_t row, float value) { decay[b * forgotten + row] = sigmoid(value); });
      meeting.wait(team);
      Lanes<float>* const memory = works + me * per_work;
      for (int64_t b = 0; b < B; ++b) {
        if (has_content(layer))
          mix_with_content(step, l, b, w + b * C, decay + b * forgotten, first, pi, start, memory, y + b * C);
        else
          mix(step, l, b, w + b * C, first, pi, memory, y + b * C);
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
