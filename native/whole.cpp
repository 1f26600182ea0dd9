#include "whole.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "elements.hpp"
#include "packing.hpp"
#include "parallel.hpp"
#include "planes.hpp"

namespace deltawire {
namespace {

constexpr unsigned kRanks = 15;  // symbols with a rank; all others share kRanks itself
constexpr unsigned kPlanes = 4;
constexpr std::uint16_t kNoSymbol = 0xFFFF;  // for ranks that the block does not use

struct Scratch {
  Room<std::uint16_t> words;
  Room<std::uint8_t> ranks;
};

template <typename Bits>
unsigned symbol_of(Bits u, Field field) {
  return static_cast<unsigned>(u >> field.low) & ((1U << field.width) - 1);
}

// Joins all bits other than the symbol's.
template <typename Bits>
Bits rest_of(Bits u, Field field) {
  const Bits below = Bits(u & Bits((std::uint64_t{1} << field.low) - 1));
  const unsigned above = field.low + field.width;
  return above >= 8 * sizeof(Bits) ? below : Bits(below | Bits(Bits(u >> above) << field.low));
}

template <typename Bits>
Bits joined(unsigned symbol, std::uint64_t rest, Field field) {
  const std::uint64_t below = rest & ((std::uint64_t{1} << field.low) - 1);
  const std::uint64_t above = field.low + field.width >= 8 * sizeof(Bits)
                                  ? 0
                                  : (rest >> field.low) << (field.low + field.width);
  return static_cast<Bits>(above | std::uint64_t{symbol} << field.low | below);
}

template <typename Bits>
std::array<std::uint32_t, 256> histogram(const Bits* bits, std::size_t count, Field field) {
  std::array<std::array<std::uint32_t, 256>, 4> parts{};
  std::size_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (std::size_t part = 0; part < 4; ++part) ++parts[part][symbol_of(bits[i + part], field)];
  }
  for (; i < count; ++i) ++parts[0][symbol_of(bits[i], field)];
  for (std::size_t s = 0; s < 256; ++s) parts[0][s] += parts[1][s] + parts[2][s] + parts[3][s];
  return parts[0];
}

// The odds of each plane. Plane p is bit p of the rank, and its context the bits above.
std::array<Odds, kPlanes> odds_of(const std::array<std::uint32_t, kRanks + 1>& counts) {
  std::array<Odds, kPlanes> odds;
  for (unsigned plane = 0; plane < kPlanes; ++plane) {
    for (unsigned context = 0; context < (kRanks + 1) >> (plane + 1); ++context) {
      std::uint64_t ones = 0, total = 0;
      for (unsigned rank = 0; rank <= kRanks; ++rank) {
        if (rank >> (plane + 1) != context) continue;
        total += counts[rank];
        ones += (rank >> plane & 1) != 0 ? counts[rank] : 0;
      }
      if (ones > 0) odds[plane].set(context, ones, total);
    }
  }
  return odds;
}

void contexts_of(const std::uint8_t* ranks, std::size_t count, unsigned plane,
                 std::uint8_t* contexts) {
  for (std::size_t i = 0; i < count; ++i) {
    contexts[i] = static_cast<std::uint8_t>(ranks[i] >> (plane + 1));
  }
}

template <typename Path, typename Bits>
DELTAWIRE_INLINE std::vector<std::uint8_t> encode_block(const Bits* bits, std::size_t count,
                                                        Field field, Scratch& scratch) {
  const std::array<std::uint32_t, 256> frequency = histogram(bits, count, field);
  std::array<std::uint8_t, 256> by_frequency;
  std::iota(by_frequency.begin(), by_frequency.end(), std::uint8_t{0});
  std::stable_sort(by_frequency.begin(), by_frequency.end(),
                   [&](std::uint8_t a, std::uint8_t b) { return frequency[a] > frequency[b]; });
  std::array<std::uint8_t, 256> rank_of;
  rank_of.fill(kRanks);
  std::array<std::uint32_t, kRanks + 1> counts{};
  std::size_t ranked = 0;
  for (unsigned rank = 0; rank < kRanks && frequency[by_frequency[rank]] > 0; ++rank) {
    rank_of[by_frequency[rank]] = static_cast<std::uint8_t>(rank);
    counts[rank] = frequency[by_frequency[rank]];
    ranked += counts[rank];
  }
  counts[kRanks] = static_cast<std::uint32_t>(count - ranked);
  std::uint8_t* ranks = scratch.ranks.of(count + kGroup);
  const unsigned rest_bits = 8 * sizeof(Bits) - field.width;
  BitPacker packer;
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned symbol = symbol_of(bits[i], field);
    ranks[i] = rank_of[symbol];
    if (ranks[i] == kRanks) packer.put(symbol, field.width);
  }
  std::vector<std::uint8_t> rest;
  if (rest_bits == 8) {
    rest.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      rest[i] = static_cast<std::uint8_t>(rest_of(bits[i], field));
    }
  } else {
    BitPacker others;
    for (std::size_t i = 0; i < count; ++i) others.put(rest_of(bits[i], field), rest_bits);
    rest = others.finish();
  }
  const std::array<Odds, kPlanes> odds = odds_of(counts);
  PlaneWriter writer(lanes_for(count), Path::kSimd, scratch.words);
  std::uint8_t contexts[kChunk];
  std::uint64_t words[kChunk / 64];
  for (unsigned plane = 0; plane < kPlanes; ++plane) {
    for (std::size_t begin = 0; begin < count; begin += kChunk) {
      const std::size_t here = std::min(kChunk, count - begin);
      contexts_of(ranks + begin, here, plane, contexts);
      for (std::size_t i = 0; i < here; i += kGroup) {
        words[i / kGroup] = Path::with_bit(ranks + begin + i, plane);
      }
      writer.put(contexts, words, 0, here, odds[plane]);
    }
  }
  std::vector<std::uint8_t> out(1 + kRanks);
  for (unsigned rank = 0; rank < kRanks; ++rank) {
    if (counts[rank] > 0) out[++out[0]] = by_frequency[rank];
  }
  out.resize(1 + std::size_t{out[0]});
  for (const Odds& each : odds) each.write(out);
  const std::vector<std::uint8_t>& escapes = packer.finish();
  const auto size = static_cast<std::uint32_t>(escapes.size());
  for (unsigned byte = 0; byte < 4; ++byte) {
    out.push_back(static_cast<std::uint8_t>(size >> (8 * byte)));
  }
  out.insert(out.end(), escapes.begin(), escapes.end());
  out.insert(out.end(), rest.begin(), rest.end());
  writer.finish(out);
  return out;
}

template <typename Path, typename Bits>
DELTAWIRE_INLINE bool decode_block(const std::uint8_t* at, std::size_t size, std::size_t count,
                                   Field field, Scratch& scratch, Bits* bits) {
  const std::uint8_t* end = at + size;
  if (size < 1 || *at > kRanks || size < 1 + std::size_t{*at}) return false;
  std::array<std::uint16_t, kRanks + 1> symbols;
  symbols.fill(kNoSymbol);
  const unsigned ranked = *at++;
  std::copy(at, at + ranked, symbols.begin());
  at += ranked;
  // Also the symbols that no element has must be possible ones, each listed once.
  std::uint64_t listed[4] = {};
  for (unsigned rank = 0; rank < ranked; ++rank) {
    const unsigned symbol = symbols[rank];
    std::uint64_t& word = listed[symbol / 64];
    if (symbol >> field.width != 0 || (word >> (symbol % 64) & 1) != 0) return false;
    word |= std::uint64_t{1} << (symbol % 64);
  }
  std::array<Odds, kPlanes> odds;
  for (Odds& each : odds) {
    if (!each.read(at, end)) return false;
  }
  if (end - at < 4) return false;
  std::uint32_t escapes;
  std::memcpy(&escapes, at, 4);
  at += 4;
  const unsigned rest_bits = 8 * sizeof(Bits) - field.width;
  const std::size_t rest_size = (count * rest_bits + 7) / 8;
  if (escapes > static_cast<std::size_t>(end - at) ||
      rest_size > static_cast<std::size_t>(end - at) - escapes) {
    return false;
  }
  BitTaker escaped(at, escapes);
  const std::uint8_t* rest = at + escapes;
  at = rest + rest_size;
  PlaneReader reader(at, static_cast<std::size_t>(end - at), lanes_for(count), Path::kSimd);
  if (!reader.ok()) return false;
  std::uint8_t* ranks = scratch.ranks.of(count + kGroup);
  std::fill_n(ranks, count, std::uint8_t{0});
  std::uint8_t contexts[kChunk];
  std::uint64_t words[kChunk / 64];
  for (unsigned plane = kPlanes; plane-- > 0;) {
    for (std::size_t begin = (count - 1) / kChunk * kChunk;; begin -= kChunk) {
      const std::size_t here = std::min(kChunk, count - begin);
      contexts_of(ranks + begin, here, plane, contexts);
      std::fill(std::begin(words), std::end(words), 0);
      reader.take(contexts, words, 0, here, odds[plane]);
      for (std::size_t i = 0; i < here; i += kGroup) {
        Path::set_bit(ranks + begin + i, plane, words[i / kGroup]);
      }
      if (begin == 0) break;
    }
  }
  if (!reader.finished()) return false;
  BitTaker others(rest, rest_size);
  unsigned seen = 0;  // the bits of all symbols
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned rank = ranks[i];
    const auto symbol = rank == kRanks ? static_cast<unsigned>(escaped.take(field.width))
                                       : unsigned{symbols[rank]};
    const std::uint64_t low = rest_bits == 8 ? rest[i] : others.take(rest_bits);
    seen |= symbol;
    bits[i] = joined<Bits>(symbol, low, field);
  }
  return seen >> field.width == 0 && escaped.finished() && (rest_bits == 8 || others.finished());
}

// One function for each path, so that the compiler may use its instructions throughout.
template <typename Bits>
std::vector<std::uint8_t> encode_portable(const Bits* bits, std::size_t count, Field field,
                                          Scratch& scratch) {
  return encode_block<PortablePath>(bits, count, field, scratch);
}

template <typename Bits>
bool decode_portable(const std::uint8_t* at, std::size_t size, std::size_t count, Field field,
                     Scratch& scratch, Bits* bits) {
  return decode_block<PortablePath>(at, size, count, field, scratch, bits);
}

#ifdef DELTAWIRE_X86
template <typename Bits>
DELTAWIRE_AVX512 std::vector<std::uint8_t> encode_avx512(const Bits* bits, std::size_t count,
                                                         Field field, Scratch& scratch) {
  return encode_block<Avx512Path>(bits, count, field, scratch);
}

template <typename Bits>
DELTAWIRE_AVX2 std::vector<std::uint8_t> encode_avx2(const Bits* bits, std::size_t count,
                                                     Field field, Scratch& scratch) {
  return encode_block<Avx2Path>(bits, count, field, scratch);
}

template <typename Bits>
DELTAWIRE_AVX512 bool decode_avx512(const std::uint8_t* at, std::size_t size, std::size_t count,
                                    Field field, Scratch& scratch, Bits* bits) {
  return decode_block<Avx512Path>(at, size, count, field, scratch, bits);
}

template <typename Bits>
DELTAWIRE_AVX2 bool decode_avx2(const std::uint8_t* at, std::size_t size, std::size_t count,
                                Field field, Scratch& scratch, Bits* bits) {
  return decode_block<Avx2Path>(at, size, count, field, scratch, bits);
}
#endif

}  // namespace

template <typename Bits>
std::vector<std::vector<std::uint8_t>> encode_whole(const Bits* bits, std::size_t count,
                                                    Field field, unsigned threads) {
  const Simd simd = simd_path();
  auto encoder = encode_portable<Bits>;
#ifdef DELTAWIRE_X86
  if (simd == Simd::avx512) encoder = encode_avx512<Bits>;
  if (simd == Simd::avx2) encoder = encode_avx2<Bits>;
#endif
  std::vector<std::vector<std::uint8_t>> blocks((count + kWholeBlock - 1) / kWholeBlock);
  parallel<Scratch>(blocks.size(), threads, [&](std::size_t b, Scratch& scratch) {
    const std::size_t first = b * kWholeBlock;
    blocks[b] = encoder(bits + first, std::min(kWholeBlock, count - first), field, scratch);
  });
  return blocks;
}

template <typename Bits>
void decode_whole(const Body& body, std::size_t count, Field field, unsigned threads, Bits* bits) {
  if (!field.fits(8 * sizeof(Bits)) || body.blocks != (count + kWholeBlock - 1) / kWholeBlock) {
    throw std::invalid_argument("the lengths are not those of these elements' blocks");
  }
  std::vector<std::pair<const std::uint8_t*, std::size_t>> blocks;
  body.each([&](std::size_t, const std::uint8_t* bytes, std::size_t size) {
    blocks.emplace_back(bytes, size);
  });
  const Simd simd = simd_path();
  auto decoder = decode_portable<Bits>;
#ifdef DELTAWIRE_X86
  if (simd == Simd::avx512) decoder = decode_avx512<Bits>;
  if (simd == Simd::avx2) decoder = decode_avx2<Bits>;
#endif
  std::atomic<bool> sound{true};
  parallel<Scratch>(blocks.size(), threads, [&](std::size_t b, Scratch& scratch) {
    const auto [bytes, size] = blocks[b];
    const std::size_t first = b * kWholeBlock;
    if (!sound || !decoder(bytes, size, std::min(kWholeBlock, count - first), field, scratch,
                           bits + first)) {
      sound = false;
    }
  });
  if (!sound) throw std::invalid_argument("the payload is not one of so many elements");
}

#define DELTAWIRE_INSTANTIATE(Bits)                                                               \
  template std::vector<std::vector<std::uint8_t>> encode_whole<Bits>(const Bits*, std::size_t,    \
                                                                     Field, unsigned);            \
  template void decode_whole<Bits>(const Body&, std::size_t, Field, unsigned, Bits*);
DELTAWIRE_INSTANTIATE(std::uint8_t)
DELTAWIRE_INSTANTIATE(std::uint16_t)
DELTAWIRE_INSTANTIATE(std::uint32_t)
DELTAWIRE_INSTANTIATE(std::uint64_t)
#undef DELTAWIRE_INSTANTIATE

}  // namespace deltawire
