#include "planes.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

static_assert(std::endian::native == std::endian::little);

namespace deltawire {

// --- odds ----------------------------------------------------------------------------------------

std::uint32_t Odds::odds_of(std::uint8_t level) {
  const std::uint32_t size = level & 0x7FU;
  const std::uint32_t odds = size < 8 ? size : (8 + (size & 7)) << ((size >> 3) - 1);
  return level & kFlipped ? kCertain - odds : odds;
}

std::uint8_t Odds::level_of(std::uint64_t ones, std::uint64_t total) {
  if (ones == 0) return 0;
  const std::uint64_t scaled = ((ones << kOddsBits) + total / 2) / total;
  const bool flip = scaled > kCertain / 2;
  const std::uint64_t odds = std::max<std::uint64_t>(flip ? kCertain - scaled : scaled, 1);
  if (odds < 8) return static_cast<std::uint8_t>(odds | (flip ? kFlipped : 0));
  const unsigned exponent = static_cast<unsigned>(std::bit_width(odds)) - 4;
  const std::uint64_t rounded = (odds + ((std::uint64_t{1} << exponent) >> 1)) >> exponent;
  const std::uint64_t level = ((exponent + 1) << 3) + (rounded - 8);
  return static_cast<std::uint8_t>(level | (flip ? kFlipped : 0));
}

void Odds::set(unsigned context, std::uint64_t ones_seen, std::uint64_t total) {
  levels[context] = level_of(ones_seen, total);
  ones[context] = odds_of(levels[context]);
}

void Odds::write(std::vector<std::uint8_t>& out) const {
  const std::size_t at = out.size();
  out.resize(at + 2);
  for (unsigned context = 0; context < kContexts; ++context) {
    if (levels[context] == 0) continue;
    out[at + context / 8] |= static_cast<std::uint8_t>(1U << (context % 8));
    out.push_back(levels[context]);
  }
}

bool Odds::read(const std::uint8_t*& at, const std::uint8_t* end) {
  if (end - at < 2) return false;
  const unsigned mask = at[0] | static_cast<unsigned>(at[1]) << 8;
  at += 2;
  if (end - at < std::popcount(mask)) return false;
  for (unsigned context = 0; context < kContexts; ++context) {
    if ((mask >> context & 1) == 0) continue;
    levels[context] = *at++;
    const std::uint8_t size = levels[context] & 0x7FU;
    if (size == 0 || size > kTopLevel) return false;
    ones[context] = odds_of(levels[context]);
  }
  return true;
}

// --- vector kernels ------------------------------------------------------------------------------
//
// They process whole steps of `lanes` decisions. A writer's `out` has room for one word per
// decision and one vector more; a reader stops when fewer words are left than a step may consume.

namespace {

#ifdef DELTAWIRE_X86

// Just below 1, so that a quotient computed in floats is never too large and at most 1 too small.
constexpr float kBelowOne = 1.0F - 1.0F / (1 << 21);

template <int kVectors>
DELTAWIRE_AVX512 std::uint16_t* put_avx512(const std::uint8_t* contexts, const std::uint64_t* bits,
                                           std::size_t begin, std::size_t end, const Odds& odds,
                                           std::uint32_t* states, std::uint16_t* out) {
  const __m512i certain = _mm512_set1_epi32(kCertain);
  const __m512i one = _mm512_set1_epi32(1);
  const __m512i ones = _mm512_load_si512(odds.ones);
  const __m512i zeros = _mm512_sub_epi32(certain, ones);
  const __m512 below = _mm512_set1_ps(kBelowOne);
  const __m512 by_ones = _mm512_div_ps(below, _mm512_cvtepi32_ps(_mm512_max_epi32(ones, one)));
  const __m512 by_zeros = _mm512_div_ps(below, _mm512_cvtepi32_ps(zeros));
  __m512i x[kVectors];
  for (int v = 0; v < kVectors; ++v) x[v] = _mm512_load_si512(states + 16 * v);
  for (std::size_t i = begin; i < end; i += 16 * kVectors, contexts += 16 * kVectors) {
    const std::uint64_t word = bits[i / 64] >> (i % 64);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const auto bit = static_cast<__mmask16>(word >> (16 * v));
      const __m512i context = _mm512_cvtepu8_epi32(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(contexts + 16 * v)));
      const __m512i odds0 = _mm512_permutexvar_epi32(context, zeros);
      const __m512i f = _mm512_mask_sub_epi32(odds0, bit, certain, odds0);
      const __m512 inverse = _mm512_mask_permutexvar_ps(
          _mm512_permutexvar_ps(context, by_zeros), bit, context, by_ones);
      const __mmask16 over = _mm512_cmpge_epu32_mask(x[v], _mm512_slli_epi32(f, 16));
      const __m256i emitted = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(over, x[v]));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), emitted);
      out += std::popcount(static_cast<unsigned>(over));
      const __m512i y = _mm512_mask_srli_epi32(x[v], over, x[v], 16);
      const __m512i quotient =
          _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_cvtepi32_ps(y), inverse));
      const __m512i rest = _mm512_sub_epi32(y, _mm512_mullo_epi32(quotient, f));
      const __mmask16 small = _mm512_cmpge_epi32_mask(rest, f);
      const __m512i q = _mm512_mask_add_epi32(quotient, small, quotient, one);
      const __m512i r = _mm512_mask_sub_epi32(rest, small, rest, f);
      const __m512i start = _mm512_maskz_mov_epi32(bit, odds0);
      x[v] = _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(q, kOddsBits), r), start);
    }
  }
  for (int v = 0; v < kVectors; ++v) _mm512_store_si512(states + 16 * v, x[v]);
  return out;
}

template <int kVectors>
DELTAWIRE_AVX512 std::size_t take_avx512(const std::uint8_t* contexts, std::uint64_t* bits,
                                         std::size_t begin, std::size_t& end, const Odds& odds,
                                         std::uint32_t* states, const std::uint8_t* words,
                                         std::size_t left) {
  constexpr std::size_t kStep = 16 * kVectors;
  const __m512i certain = _mm512_set1_epi32(kCertain);
  const __m512i slots = _mm512_set1_epi32(kCertain - 1);
  const __m512i lowest = _mm512_set1_epi32(kLowest);
  const __m512i zeros = _mm512_sub_epi32(certain, _mm512_load_si512(odds.ones));
  __m512i x[kVectors];
  for (int v = 0; v < kVectors; ++v) x[v] = _mm512_load_si512(states + 16 * v);
  const std::uint8_t* at = words + 2 * left;
  const std::uint8_t* stop = words + 2 * kStep;
  while (end > begin && at >= stop) {
    end -= kStep;
    const std::uint8_t* here = contexts + (end - begin);
    std::uint64_t word = 0;
#pragma GCC unroll 4
    for (int v = kVectors - 1; v >= 0; --v) {
      const __m512i context = _mm512_cvtepu8_epi32(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(here + 16 * v)));
      const __m512i odds0 = _mm512_permutexvar_epi32(context, zeros);
      const __m512i slot = _mm512_and_si512(x[v], slots);
      const __mmask16 bit = _mm512_cmpge_epi32_mask(slot, odds0);
      const __m512i f = _mm512_mask_sub_epi32(odds0, bit, certain, odds0);
      const __m512i offset = _mm512_mask_sub_epi32(slot, bit, slot, odds0);
      const __m512i y = _mm512_add_epi32(
          _mm512_mullo_epi32(f, _mm512_srli_epi32(x[v], kOddsBits)), offset);
      const __mmask16 under = _mm512_cmplt_epi32_mask(y, lowest);
      at -= 2 * std::popcount(static_cast<unsigned>(under));
      const __m512i fresh = _mm512_maskz_expand_epi32(
          under, _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))));
      x[v] = _mm512_mask_or_epi32(y, under, _mm512_slli_epi32(y, 16), fresh);
      word |= static_cast<std::uint64_t>(bit) << (16 * v);
    }
    bits[end / 64] |= word << (end % 64);
  }
  for (int v = 0; v < kVectors; ++v) _mm512_store_si512(states + 16 * v, x[v]);
  return static_cast<std::size_t>(at - words) / 2;
}

// Shuffles of eight 16-bit words, by mask: compress the masked words, or expand words to the mask.
struct Shuffles {
  alignas(16) std::uint8_t together[256][16];
  alignas(16) std::uint8_t spread[256][16];
};

constexpr Shuffles make_shuffles() {
  Shuffles table{};
  for (unsigned mask = 0; mask < 256; ++mask) {
    unsigned next = 0;
    for (unsigned lane = 0; lane < 8; ++lane) {
      for (unsigned byte = 0; byte < 2; ++byte) {
        table.spread[mask][2 * lane + byte] = 0x80;
        table.together[mask][2 * lane + byte] = 0x80;
      }
    }
    for (unsigned lane = 0; lane < 8; ++lane) {
      if ((mask >> lane & 1) == 0) continue;
      for (unsigned byte = 0; byte < 2; ++byte) {
        table.together[mask][2 * next + byte] = static_cast<std::uint8_t>(2 * lane + byte);
        table.spread[mask][2 * lane + byte] = static_cast<std::uint8_t>(2 * next + byte);
      }
      ++next;
    }
  }
  return table;
}

constexpr Shuffles kShuffles = make_shuffles();

// Looks up eight contexts in a table of sixteen entries.
DELTAWIRE_AVX2 inline __m256i look_up(const __m256i (&table)[2], __m256i context) {
  const __m256i low = _mm256_permutevar8x32_epi32(table[0], context);
  const __m256i high = _mm256_permutevar8x32_epi32(table[1], context);
  return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high),
                                              _mm256_castsi256_ps(_mm256_slli_epi32(context, 28))));
}

DELTAWIRE_AVX2 inline void load_zeros(const Odds& odds, __m256i (&zeros)[2]) {
  const __m256i certain = _mm256_set1_epi32(kCertain);
  for (int half = 0; half < 2; ++half) {
    zeros[half] = _mm256_sub_epi32(
        certain, _mm256_load_si256(reinterpret_cast<const __m256i*>(odds.ones + 8 * half)));
  }
}

DELTAWIRE_AVX2 inline unsigned mask_of(__m256i lanes) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes)));
}

template <int kVectors>
DELTAWIRE_AVX2 std::uint16_t* put_avx2(const std::uint8_t* contexts, const std::uint64_t* bits,
                                       std::size_t begin, std::size_t end, const Odds& odds,
                                       std::uint32_t* states, std::uint16_t* out) {
  const __m256i certain = _mm256_set1_epi32(kCertain);
  const __m256i select = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1);
  const __m256i low16 = _mm256_set1_epi32(0xFFFF);
  const __m256 below = _mm256_set1_ps(kBelowOne);
  __m256i zeros[2];
  load_zeros(odds, zeros);
  for (std::size_t i = begin; i < end; i += 8 * kVectors, contexts += 8 * kVectors) {
    const std::uint64_t word = bits[i / 64] >> (i % 64);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      auto* state = reinterpret_cast<__m256i*>(states + 8 * v);
      const __m256i x = _mm256_load_si256(state);
      const int eight = static_cast<int>(word >> (8 * v) & 0xFF);
      const __m256i bit =
          _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(eight), select), select);
      const __m256i context = _mm256_cvtepu8_epi32(
          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(contexts + 8 * v)));
      const __m256i odds0 = look_up(zeros, context);
      const __m256i f = _mm256_blendv_epi8(odds0, _mm256_sub_epi32(certain, odds0), bit);
      const __m256i over = _mm256_cmpeq_epi32(_mm256_max_epu32(x, _mm256_slli_epi32(f, 16)), x);
      const unsigned mask = mask_of(over);
      const __m256i low = _mm256_and_si256(x, low16);
      const __m128i words =
          _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
      const __m128i together = _mm_shuffle_epi8(
          words, _mm_load_si128(reinterpret_cast<const __m128i*>(kShuffles.together[mask])));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), together);
      out += std::popcount(mask);
      const __m256i y = _mm256_blendv_epi8(x, _mm256_srli_epi32(x, 16), over);
      const __m256 ratio = _mm256_div_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(y), below),
                                         _mm256_cvtepi32_ps(f));
      const __m256i quotient = _mm256_cvttps_epi32(ratio);
      const __m256i rest = _mm256_sub_epi32(y, _mm256_mullo_epi32(quotient, f));
      const __m256i fits = _mm256_cmpgt_epi32(f, rest);
      const __m256i q = _mm256_sub_epi32(
          quotient, _mm256_andnot_si256(fits, _mm256_set1_epi32(-1)));
      const __m256i r = _mm256_sub_epi32(rest, _mm256_andnot_si256(fits, f));
      const __m256i start = _mm256_and_si256(bit, odds0);
      _mm256_store_si256(
          state, _mm256_add_epi32(_mm256_add_epi32(_mm256_slli_epi32(q, kOddsBits), r), start));
    }
  }
  return out;
}

template <int kVectors>
DELTAWIRE_AVX2 std::size_t take_avx2(const std::uint8_t* contexts, std::uint64_t* bits,
                                     std::size_t begin, std::size_t& end, const Odds& odds,
                                     std::uint32_t* states, const std::uint8_t* words,
                                     std::size_t left) {
  constexpr std::size_t kStep = 8 * kVectors;
  const __m256i certain = _mm256_set1_epi32(kCertain);
  const __m256i slots = _mm256_set1_epi32(kCertain - 1);
  const __m256i lowest = _mm256_set1_epi32(kLowest);
  __m256i zeros[2];
  load_zeros(odds, zeros);
  const std::uint8_t* at = words + 2 * left;
  const std::uint8_t* stop = words + 2 * kStep;
  while (end > begin && at >= stop) {
    end -= kStep;
    const std::uint8_t* here = contexts + (end - begin);
    std::uint64_t word = 0;
#pragma GCC unroll 8
    for (int v = kVectors - 1; v >= 0; --v) {
      auto* state = reinterpret_cast<__m256i*>(states + 8 * v);
      const __m256i x = _mm256_load_si256(state);
      const __m256i context = _mm256_cvtepu8_epi32(
          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(here + 8 * v)));
      const __m256i odds0 = look_up(zeros, context);
      const __m256i slot = _mm256_and_si256(x, slots);
      const __m256i zero = _mm256_cmpgt_epi32(odds0, slot);
      const __m256i f = _mm256_blendv_epi8(_mm256_sub_epi32(certain, odds0), odds0, zero);
      const __m256i offset = _mm256_sub_epi32(slot, _mm256_andnot_si256(zero, odds0));
      const __m256i y = _mm256_add_epi32(
          _mm256_mullo_epi32(f, _mm256_srli_epi32(x, kOddsBits)), offset);
      const __m256i under = _mm256_cmpgt_epi32(lowest, y);
      const unsigned mask = mask_of(under);
      at -= 2 * std::popcount(mask);
      const __m128i spread = _mm_shuffle_epi8(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)),
          _mm_load_si128(reinterpret_cast<const __m128i*>(kShuffles.spread[mask])));
      const __m256i full =
          _mm256_or_si256(_mm256_slli_epi32(y, 16), _mm256_cvtepu16_epi32(spread));
      _mm256_store_si256(state, _mm256_blendv_epi8(y, full, under));
      word |= std::uint64_t{~mask_of(zero) & 0xFFU} << (8 * v);
    }
    bits[end / 64] |= word << (end % 64);
  }
  return static_cast<std::size_t>(at - words) / 2;
}

#endif  // DELTAWIRE_X86

}  // namespace

// --- writing -------------------------------------------------------------------------------------

PlaneWriter::PlaneWriter(unsigned lanes, Simd simd, Room<std::uint16_t>& room)
    : lanes_(lanes), simd_(simd), room_(room) {
  std::fill(states_, states_ + kMostLanes, kLowest);
}

void PlaneWriter::put(const std::uint8_t* contexts, const std::uint64_t* bits, std::size_t begin,
                      std::size_t end, const Odds& odds) {
  [[maybe_unused]] std::uint16_t* words =
      room_.of(fill_ + (end - begin) + kMostLanes, fill_);
  std::size_t whole = begin;
#ifdef DELTAWIRE_X86
  if (lanes_ > 1 && simd_ != Simd::portable) {
    whole = end - (end - begin) % lanes_;
    std::uint16_t* out = words + fill_;
    const auto kernel = simd_ == Simd::avx512 ? (lanes_ == 64 ? put_avx512<4> : put_avx512<1>)
                                              : (lanes_ == 64 ? put_avx2<8> : put_avx2<2>);
    out = kernel(contexts, bits, begin, whole, odds, states_, out);
    fill_ = static_cast<std::size_t>(out - words);
  }
#endif
  put_each(contexts + (whole - begin), bits, whole, end, odds);
}

void PlaneWriter::put_each(const std::uint8_t* contexts, const std::uint64_t* bits,
                           std::size_t begin, std::size_t end, const Odds& odds) {
  for (std::size_t i = begin; i < end; ++i) {
    const bool bit = (bits[i / 64] >> (i % 64) & 1) != 0;
    const std::uint32_t ones = odds.ones[*contexts++];
    const std::uint32_t f = bit ? ones : kCertain - ones;
    std::uint32_t& x = states_[i % lanes_];
    if (x >= f << 16) {
      room_.get()[fill_++] = static_cast<std::uint16_t>(x);
      x >>= 16;
    }
    x = ((x / f) << kOddsBits) + x % f + (bit ? kCertain - ones : 0);
  }
}

void PlaneWriter::finish(std::vector<std::uint8_t>& out) const {
  const std::size_t at = out.size();
  out.resize(at + bytes());
  if (fill_ > 0) std::memcpy(out.data() + at, room_.get(), 2 * fill_);
  std::memcpy(out.data() + at + 2 * fill_, states_, 4 * std::size_t{lanes_});
}

// --- reading -------------------------------------------------------------------------------------

PlaneReader::PlaneReader(const std::uint8_t* bytes, std::size_t size, unsigned lanes, Simd simd)
    : lanes_(lanes), simd_(simd), ok_(size >= 4 * std::size_t{lanes} && size % 2 == 0),
      words_(bytes), left_(ok_ ? (size - 4 * std::size_t{lanes}) / 2 : 0) {
  std::fill(states_, states_ + kMostLanes, kLowest);
  if (!ok_) return;
  std::memcpy(states_, bytes + 2 * left_, 4 * std::size_t{lanes});
  for (unsigned lane = 0; lane < lanes; ++lane) {
    ok_ = ok_ && states_[lane] >= kLowest && states_[lane] < 1U << 31;
  }
}

void PlaneReader::take(const std::uint8_t* contexts, std::uint64_t* bits, std::size_t begin,
                       std::size_t end, const Odds& odds) {
#ifdef DELTAWIRE_X86
  if (lanes_ > 1 && simd_ != Simd::portable) {
    const std::size_t whole = end - (end - begin) % lanes_;
    take_each(contexts + (whole - begin), bits, whole, end, odds);
    end = whole;
    const auto kernel = simd_ == Simd::avx512 ? (lanes_ == 64 ? take_avx512<4> : take_avx512<1>)
                                              : (lanes_ == 64 ? take_avx2<8> : take_avx2<2>);
    left_ = kernel(contexts, bits, begin, end, odds, states_, words_, left_);
  }
#endif
  take_each(contexts, bits, begin, end, odds);
}

void PlaneReader::take_each(const std::uint8_t* contexts, std::uint64_t* bits, std::size_t begin,
                            std::size_t end, const Odds& odds) {
  for (std::size_t i = end; i-- > begin;) {
    const std::uint32_t ones = odds.ones[contexts[i - begin]];
    const std::uint32_t zeros = kCertain - ones;
    std::uint32_t& x = states_[i % lanes_];
    const std::uint32_t slot = x & (kCertain - 1);
    const bool bit = slot >= zeros;
    x = (bit ? ones : zeros) * (x >> kOddsBits) + slot - (bit ? zeros : 0);
    if (x < kLowest) {
      std::uint16_t word = 0;
      if (left_ > 0) {
        std::memcpy(&word, words_ + 2 * --left_, 2);
      } else {
        ok_ = false;
      }
      x = x << 16 | word;
    }
    bits[i / 64] |= std::uint64_t{bit} << (i % 64);
  }
}

bool PlaneReader::finished() const {
  return ok_ && left_ == 0 &&
         std::all_of(states_, states_ + lanes_, [](std::uint32_t x) { return x == kLowest; });
}

}  // namespace deltawire
