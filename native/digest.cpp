#include "digest.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "simd.hpp"

// An 8-byte element is read as two 4-byte units, low half first, straight from memory.
static_assert(std::endian::native == std::endian::little);

namespace deltawire {
namespace {

constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15;  // 2^64 / golden ratio
constexpr int kFold = 29;
constexpr std::size_t kAhead = 2048;  // bytes that are fetched before they are needed

inline void mix(Lanes& sum, std::uint64_t x, std::uint32_t bits) {
  const auto low = static_cast<std::uint32_t>(x);
  const std::uint64_t product = std::uint64_t{low ^ bits} * ((x >> 32) | 1);
  const std::uint64_t folded = product ^ (product >> kFold);
  sum.lane0 += folded;
  sum.lane1 += std::uint64_t{static_cast<std::uint32_t>(folded)} *
               static_cast<std::uint32_t>((folded >> 32) ^ low);
}

// `x` belongs to the first unit. memcpy reads the units, because they may be halves of 8-byte
// elements, which no pointer to a unit may alias.
template <typename Unit>
Lanes units_portable(const Unit* units, std::size_t count, std::uint64_t x) {
  Lanes sum;
  for (std::size_t i = 0; i < count; ++i, x += kStep) {
    Unit unit;
    std::memcpy(&unit, units + i, sizeof(unit));
    mix(sum, x, unit);
  }
  return sum;
}

#ifdef DELTAWIRE_X86

// Twice as fast on a processor that does not fetch ahead by itself. A bad address is ignored.
inline void fetch_ahead(const void* at) {
  _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(at) + kAhead),
               _MM_HINT_T0);
}

// Adds the mix of four units. `bits` has each unit in the low half of a lane: the multiplications
// ignore the high halves.
DELTAWIRE_AVX2 inline void mix4(__m256i x, __m256i bits, __m256i& lane0, __m256i& lane1) {
  const __m256i product = _mm256_mul_epu32(
      _mm256_xor_si256(x, bits), _mm256_or_si256(_mm256_srli_epi64(x, 32), _mm256_set1_epi64x(1)));
  const __m256i folded = _mm256_xor_si256(product, _mm256_srli_epi64(product, kFold));
  lane0 = _mm256_add_epi64(lane0, folded);
  lane1 = _mm256_add_epi64(
      lane1, _mm256_mul_epu32(folded, _mm256_xor_si256(_mm256_srli_epi64(folded, 32), x)));
}

DELTAWIRE_AVX2 inline void add_lanes(Lanes& sum, __m256i lane0, __m256i lane1) {
  alignas(32) std::uint64_t parts[2][4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(parts[0]), lane0);
  _mm256_store_si256(reinterpret_cast<__m256i*>(parts[1]), lane1);
  for (std::size_t lane = 0; lane < 4; ++lane) {
    sum.lane0 += parts[0][lane];
    sum.lane1 += parts[1][lane];
  }
}

template <typename Unit>
DELTAWIRE_AVX2 Lanes units_avx2(const Unit* units, std::size_t count,
                                                 std::uint64_t x) {
  constexpr std::size_t width = 4;
  __m256i x4 = _mm256_set_epi64x(static_cast<long long>(x + 3 * kStep),
                                 static_cast<long long>(x + 2 * kStep),
                                 static_cast<long long>(x + kStep), static_cast<long long>(x));
  const __m256i step = _mm256_set1_epi64x(static_cast<long long>(width * kStep));
  __m256i lane0 = _mm256_setzero_si256();
  __m256i lane1 = _mm256_setzero_si256();
  std::size_t i = 0;
  for (; i + width <= count; i += width) {
    fetch_ahead(units + i);
    __m256i bits;
    if constexpr (sizeof(Unit) == 1) {
      int four;
      std::memcpy(&four, units + i, sizeof(four));
      bits = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
    } else if constexpr (sizeof(Unit) == 2) {
      bits = _mm256_cvtepu16_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(units + i)));
    } else {
      bits = _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(units + i)));
    }
    mix4(x4, bits, lane0, lane1);
    x4 = _mm256_add_epi64(x4, step);
  }
  Lanes sum = units_portable(units + i, count - i, x + i * kStep);
  add_lanes(sum, lane0, lane1);
  return sum;
}

// As mix4, for eight units.
DELTAWIRE_AVX512 inline void mix8(__m512i x, __m512i bits, __m512i& lane0, __m512i& lane1) {
  const __m512i product = _mm512_mul_epu32(
      _mm512_xor_si512(x, bits), _mm512_or_si512(_mm512_srli_epi64(x, 32), _mm512_set1_epi64(1)));
  const __m512i folded = _mm512_xor_si512(product, _mm512_srli_epi64(product, kFold));
  lane0 = _mm512_add_epi64(lane0, folded);
  lane1 = _mm512_add_epi64(
      lane1, _mm512_mul_epu32(folded, _mm512_xor_si512(_mm512_srli_epi64(folded, 32), x)));
}

// Not by _mm512_reduce_add_epi64: GCC's adds signed numbers, which must not overflow.
DELTAWIRE_AVX512 inline void add_lanes(Lanes& sum, __m512i lane0, __m512i lane1) {
  alignas(64) std::uint64_t parts[2][8];
  _mm512_store_si512(parts[0], lane0);
  _mm512_store_si512(parts[1], lane1);
  for (std::size_t lane = 0; lane < 8; ++lane) {
    sum.lane0 += parts[0][lane];
    sum.lane1 += parts[1][lane];
  }
}

template <typename Unit>
DELTAWIRE_AVX512 Lanes units_avx512(const Unit* units, std::size_t count,
                                                      std::uint64_t x) {
  constexpr std::size_t width = 8;
  const auto at = [x](std::uint64_t i) { return static_cast<long long>(x + i * kStep); };
  __m512i x8 = _mm512_set_epi64(at(7), at(6), at(5), at(4), at(3), at(2), at(1), at(0));
  const __m512i step = _mm512_set1_epi64(static_cast<long long>(width * kStep));
  __m512i lane0 = _mm512_setzero_si512();
  __m512i lane1 = _mm512_setzero_si512();
  std::size_t i = 0;
  for (; i + width <= count; i += width) {
    fetch_ahead(units + i);
    __m512i bits;
    if constexpr (sizeof(Unit) == 1) {
      bits = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(units + i)));
    } else if constexpr (sizeof(Unit) == 2) {
      bits = _mm512_cvtepu16_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(units + i)));
    } else {
      bits = _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(units + i)));
    }
    mix8(x8, bits, lane0, lane1);
    x8 = _mm512_add_epi64(x8, step);
  }
  Lanes sum = units_portable(units + i, count - i, x + i * kStep);
  add_lanes(sum, lane0, lane1);
  return sum;
}

#endif  // DELTAWIRE_X86

template <typename Unit>
Lanes units_digest(const Unit* units, std::size_t count, std::uint64_t x) {
#ifdef DELTAWIRE_X86
  const Simd simd = simd_path();
  if (simd == Simd::avx512) return units_avx512(units, count, x);
  if (simd == Simd::avx2) return units_avx2(units, count, x);
#endif
  return units_portable(units, count, x);
}

constexpr std::uint32_t kMagnitude = 0x7FFFFFFF;
constexpr std::uint32_t kInfinity = 0x7F800000;  // larger magnitudes are no numbers

RoundedLanes rounded_portable(const float* values, std::size_t count, std::uint64_t x) {
  RoundedLanes found;
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i, x += kStep) {
    std::uint32_t bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    largest = std::max(largest, bits & kMagnitude);
    mix(found.sum, x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
  found.numbers = largest <= kInfinity;
  return found;
}

#ifdef DELTAWIRE_X86

// The elements at even places lie in the low halves of 64-bit lanes, the others in the high ones.
DELTAWIRE_AVX2 RoundedLanes rounded_avx2(const float* values, std::size_t count, std::uint64_t x) {
  constexpr std::size_t width = 8;
  const auto at = [x](std::uint64_t i) { return static_cast<long long>(x + i * kStep); };
  __m256i even = _mm256_set_epi64x(at(6), at(4), at(2), at(0));
  __m256i odd = _mm256_set_epi64x(at(7), at(5), at(3), at(1));
  const __m256i step = _mm256_set1_epi64x(static_cast<long long>(width * kStep));
  const __m256i half = _mm256_set1_epi32(0x7FFF), one = _mm256_set1_epi32(1);
  const __m256i magnitude = _mm256_set1_epi32(kMagnitude);
  __m256i largest = _mm256_setzero_si256();
  __m256i lane0 = _mm256_setzero_si256();
  __m256i lane1 = _mm256_setzero_si256();
  std::size_t i = 0;
  for (; i + width <= count; i += width) {
    fetch_ahead(values + i);
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i));
    largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, magnitude));
    const __m256i to_even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, half), to_even), 16);
    mix4(even, rounded, lane0, lane1);
    mix4(odd, _mm256_srli_epi64(rounded, 32), lane0, lane1);
    even = _mm256_add_epi64(even, step);
    odd = _mm256_add_epi64(odd, step);
  }
  RoundedLanes found = rounded_portable(values + i, count - i, x + i * kStep);
  add_lanes(found.sum, lane0, lane1);
  alignas(32) std::uint32_t magnitudes[width];
  _mm256_store_si256(reinterpret_cast<__m256i*>(magnitudes), largest);
  for (const std::uint32_t one_of : magnitudes) found.numbers &= one_of <= kInfinity;
  return found;
}

DELTAWIRE_AVX512 RoundedLanes rounded_avx512(const float* values, std::size_t count,
                                             std::uint64_t x) {
  constexpr std::size_t width = 16;
  const auto at = [x](std::uint64_t i) { return static_cast<long long>(x + i * kStep); };
  __m512i even =
      _mm512_set_epi64(at(14), at(12), at(10), at(8), at(6), at(4), at(2), at(0));
  __m512i odd = _mm512_set_epi64(at(15), at(13), at(11), at(9), at(7), at(5), at(3), at(1));
  const __m512i step = _mm512_set1_epi64(static_cast<long long>(width * kStep));
  const __m512i half = _mm512_set1_epi32(0x7FFF), one = _mm512_set1_epi32(1);
  const __m512i magnitude = _mm512_set1_epi32(kMagnitude);
  __m512i largest = _mm512_setzero_si512();
  __m512i lane0 = _mm512_setzero_si512();
  __m512i lane1 = _mm512_setzero_si512();
  std::size_t i = 0;
  for (; i + width <= count; i += width) {
    fetch_ahead(values + i);
    const __m512i bits = _mm512_loadu_si512(values + i);
    largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, magnitude));
    const __m512i to_even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, half), to_even), 16);
    mix8(even, rounded, lane0, lane1);
    mix8(odd, _mm512_srli_epi64(rounded, 32), lane0, lane1);
    even = _mm512_add_epi64(even, step);
    odd = _mm512_add_epi64(odd, step);
  }
  RoundedLanes found = rounded_portable(values + i, count - i, x + i * kStep);
  add_lanes(found.sum, lane0, lane1);
  alignas(64) std::uint32_t magnitudes[width];
  _mm512_store_si512(magnitudes, largest);
  for (const std::uint32_t one_of : magnitudes) found.numbers &= one_of <= kInfinity;
  return found;
}

#endif  // DELTAWIRE_X86

}  // namespace

RoundedLanes digest_rounded(const float* values, std::size_t count, std::uint64_t key,
                            std::uint64_t start) {
  const std::uint64_t x = key + (start + 1) * kStep;
#ifdef DELTAWIRE_X86
  const Simd simd = simd_path();
  if (simd == Simd::avx512) return rounded_avx512(values, count, x);
  if (simd == Simd::avx2) return rounded_avx2(values, count, x);
#endif
  return rounded_portable(values, count, x);
}

template <typename Bits>
Lanes digest(const Bits* bits, std::size_t count, std::uint64_t key, std::uint64_t start) {
  if constexpr (sizeof(Bits) == 8) {
    return units_digest(reinterpret_cast<const std::uint32_t*>(bits), 2 * count,
                        key + (2 * start + 1) * kStep);
  } else {
    return units_digest(bits, count, key + (start + 1) * kStep);
  }
}

namespace {

template <typename Bits>
inline void mix_element(Lanes& sum, std::uint64_t key, std::uint64_t position, Bits bits) {
  if constexpr (sizeof(Bits) == 8) {
    const std::uint64_t x = key + (2 * position + 1) * kStep;
    mix(sum, x, static_cast<std::uint32_t>(bits));
    mix(sum, x + kStep, static_cast<std::uint32_t>(bits >> 32));
  } else {
    mix(sum, key + (position + 1) * kStep, bits);
  }
}

}  // namespace

template <typename Bits>
Lanes digest_moves(const std::uint32_t* positions, const Bits* before, const Bits* after,
                   std::size_t count, std::uint64_t key, std::uint64_t start) {
  Lanes old, fresh;
  for (std::size_t k = 0; k < count; ++k) {
    mix_element(fresh, key, start + positions[k], after[k]);
    mix_element(old, key, start + positions[k], before[k]);
  }
  return {fresh.lane0 - old.lane0, fresh.lane1 - old.lane1};
}

template <typename Bits>
Lanes digest_at(const std::int64_t* positions, const Bits* bits, std::size_t count,
                std::uint64_t key) {
  Lanes sum;
  for (std::size_t i = 0; i < count; ++i) {
    mix_element(sum, key, static_cast<std::uint64_t>(positions[i]), bits[i]);
  }
  return sum;
}

#define DELTAWIRE_INSTANTIATE(Bits)                                                          \
  template Lanes digest<Bits>(const Bits*, std::size_t, std::uint64_t, std::uint64_t);       \
  template Lanes digest_at<Bits>(const std::int64_t*, const Bits*, std::size_t, std::uint64_t); \
  template Lanes digest_moves<Bits>(const std::uint32_t*, const Bits*, const Bits*, std::size_t, \
                                    std::uint64_t, std::uint64_t);
DELTAWIRE_INSTANTIATE(std::uint8_t)
DELTAWIRE_INSTANTIATE(std::uint16_t)
DELTAWIRE_INSTANTIATE(std::uint32_t)
DELTAWIRE_INSTANTIATE(std::uint64_t)
#undef DELTAWIRE_INSTANTIATE

}  // namespace deltawire
