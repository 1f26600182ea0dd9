#include "dequantize.hpp"

#include <algorithm>
#include <bit>

#include "parallel.hpp"
#include "simd.hpp"

namespace deltawire {
namespace {

// Elements that one piece of work covers at least: with fewer, a thread costs more than it saves.
constexpr std::size_t kShare = std::size_t{1} << 18;

struct NoScratch {};

// Rounds to the nearest bf16, ties to even, as torch does.
inline std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (value != value) return 0x7FC0;
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

template <std::size_t Count>
inline void scale_table(const float* values, float scale, std::uint16_t* table) {
  for (std::size_t i = 0; i < Count; ++i) table[i] = to_bf16(values[i] * scale);
}

// Groups `first` to `last` of codes of 4 bits. Sixteen products for a group instead of one for each
// weight: the rest is table lookups.
void groups_portable(const std::uint8_t* codes, const float* values, const float* scales,
                     std::size_t first, std::size_t last, std::size_t group, std::uint16_t* out) {
  for (std::size_t at = first; at < last; ++at) {
    std::uint16_t table[16];
    scale_table<16>(values, scales[at], table);
    const std::uint8_t* in = codes + at * (group / 2);
    std::uint16_t* to = out + at * group;
    for (std::size_t i = 0; i < group / 2; ++i) {
      to[2 * i] = table[in[i] & 15];
      to[2 * i + 1] = table[in[i] >> 4];
    }
  }
}

#ifdef DELTAWIRE_X86
// As `groups_portable`, for groups of a multiple of 32 codes.
DELTAWIRE_AVX512 void groups_avx512(const std::uint8_t* codes, const float* values,
                                    const float* scales, std::size_t first, std::size_t last,
                                    std::size_t group, std::uint16_t* out) {
  const __m512 unscaled = _mm512_loadu_ps(values);
  const __m512i half = _mm512_set1_epi32(0x7FFF);
  const __m512i one = _mm512_set1_epi32(1);
  const __m512i nan = _mm512_set1_epi32(0x7FC0);
  const __m512i low = _mm512_set1_epi32(0xF);
  const __m512i high = _mm512_set1_epi32(0xF0000);
  for (std::size_t at = first; at < last; ++at) {
    const __m512 product = _mm512_mul_ps(unscaled, _mm512_set1_ps(scales[at]));
    const __m512i bits = _mm512_castps_si512(product);
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(half, even));
    const __mmask16 unordered = _mm512_cmp_ps_mask(product, product, _CMP_UNORD_Q);
    const __m512i rounded = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), unordered, nan);
    const __m512i table = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(rounded));
    const std::uint8_t* in = codes + at * (group / 2);
    std::uint16_t* to = out + at * group;
    for (std::size_t i = 0; i < group; i += 32) {
      // Each byte becomes the indexes of two neighboring words: its low half, then its high half.
      const __m512i pair =
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i / 2)));
      const __m512i index = _mm512_or_si512(_mm512_and_si512(pair, low),
                                            _mm512_and_si512(_mm512_slli_epi32(pair, 12), high));
      _mm512_storeu_si512(to + i, _mm512_permutexvar_epi16(index, table));
    }
  }
}
#endif

}  // namespace

void dequantize4(const std::uint8_t* codes, const float* values, const float* scales,
                 std::size_t groups, std::size_t group, unsigned threads, std::uint16_t* out) {
  if (group == 0) return;
  auto work = groups_portable;
#ifdef DELTAWIRE_X86
  if (group % 32 == 0 && simd_path() == Simd::avx512) work = groups_avx512;
#endif
  const std::size_t share = std::max<std::size_t>(kShare / group, 1);
  const std::size_t pieces = (groups + share - 1) / share;
  parallel<NoScratch>(pieces, threads, [&](std::size_t piece, NoScratch&) {
    const std::size_t last = std::min(groups, (piece + 1) * share);
    work(codes, values, scales, piece * share, last, group, out);
  });
}

void dequantize8(const std::uint8_t* codes, const float* values, const float* scales,
                 std::size_t rows, std::size_t columns, std::size_t block_rows,
                 std::size_t block_columns, unsigned threads, std::uint16_t* out) {
  if (rows == 0 || columns == 0 || block_rows == 0 || block_columns == 0) return;
  const std::size_t across = (columns + block_columns - 1) / block_columns;
  const std::size_t bands = (rows + block_rows - 1) / block_rows;
  const std::size_t share = std::max<std::size_t>(kShare / (block_rows * columns), 1);
  const std::size_t pieces = (bands + share - 1) / share;
  parallel<NoScratch>(pieces, threads, [&](std::size_t piece, NoScratch&) {
    const std::size_t last_band = std::min(bands, (piece + 1) * share);
    for (std::size_t band = piece * share; band < last_band; ++band) {
      const std::size_t last_row = std::min(rows, (band + 1) * block_rows);
      for (std::size_t block = 0; block < across; ++block) {
        std::uint16_t table[256];
        scale_table<256>(values, scales[band * across + block], table);
        const std::size_t first = block * block_columns;
        const std::size_t last = std::min(columns, first + block_columns);
        for (std::size_t row = band * block_rows; row < last_row; ++row) {
          const std::uint8_t* in = codes + row * columns;
          std::uint16_t* to = out + row * columns;
          for (std::size_t i = first; i < last; ++i) to[i] = table[in[i]];
        }
      }
    }
  });
}

}  // namespace deltawire
