#include <array>
#include <bit>

#include "changes.hpp"
#include "delta.hpp"
#include "elements.hpp"
#include "packing.hpp"
#include "parallel.hpp"
#include "planes.hpp"

namespace deltawire {
namespace {

struct Counts {
  std::uint64_t ones = 0, total = 0;
};
using ByContext = std::array<Counts, kContexts>;

Odds odds_from(const ByContext& counts) {
  Odds odds;
  for (unsigned context = 0; context < kContexts; ++context) {
    if (counts[context].ones > 0) odds.set(context, counts[context].ones, counts[context].total);
  }
  return odds;
}

// Counts a plane's decisions by context. `contexts` has room for a group more than `size`; with a
// null `bits` there are no ones.
template <typename Path>
DELTAWIRE_INLINE void tally(const std::uint8_t* contexts, const std::uint64_t* bits,
                            std::size_t size, ByContext& counts) {
  for (std::size_t i = 0; i < size; i += kGroup) {
    const std::uint64_t all = ~std::uint64_t{0} >> (kGroup - std::min(kGroup, size - i));
    const std::uint64_t ones = bits == nullptr ? 0 : bits[i / kGroup];
    for (unsigned context = 0; context < kContexts; ++context) {
      const std::uint64_t of = Path::equal(contexts + i, static_cast<std::uint8_t>(context)) & all;
      counts[context].total += static_cast<std::uint64_t>(std::popcount(of));
      counts[context].ones += static_cast<std::uint64_t>(std::popcount(of & ones));
    }
  }
}

// Writes a whole plane with the odds of its counts, and returns the odds.
template <typename Path>
DELTAWIRE_INLINE Odds put_plane(PlaneWriter& writer, const std::uint8_t* contexts,
                                const std::uint64_t* bits, std::size_t size) {
  ByContext counts{};
  tally<Path>(contexts, bits, size, counts);
  const Odds odds = odds_from(counts);
  writer.put(contexts, bits, 0, size, odds);
  return odds;
}

// The buffers of one encoding thread, reused from block to block.
template <typename Bits>
struct Scratch {
  Changes<Bits> changes;
  Room<Bits> after;
  Room<std::uint64_t> changed, bits;
  Room<std::uint8_t> contexts;
  Room<std::uint16_t> words;
  SignMemory memory;
};

template <typename Bits>
struct Block {
  const Bits* base;
  const Bits* target;
  std::size_t count;
  std::size_t columns;
  Layout layout;
};

// Compares and gathers the changes chunk by chunk, while they are in the first-level cache.
template <typename Path, typename Bits>
DELTAWIRE_INLINE void gather(const Block<Bits>& block, Scratch<Bits>& scratch) {
  Changes<Bits>& changes = scratch.changes;
  std::uint64_t* changed = scratch.changed.of(words_for(block.count));
  std::uint16_t indices[kChunk + kGroup];
  std::size_t size = 0;
  for (std::size_t begin = 0; begin < block.count; begin += kChunk) {
    const std::size_t here = std::min(kChunk, block.count - begin);
    const Bits* base = block.base + begin;
    const Bits* target = block.target + begin;
    std::size_t found = 0;
    for (std::size_t i = 0; i < here; i += kGroup) {
      const std::uint64_t mask = i + kGroup <= here
                                     ? Path::changed(base + i, target + i)
                                     : differences(base + i, target + i, here - i);
      changed[(begin + i) / kGroup] = mask;
      found += Path::indices(mask, i, indices + found);
    }
    changes.reserve(size + found, size);
    std::uint32_t* positions = changes.positions.get() + size;
    Bits* before = changes.before.get() + size;
    Bits* after = scratch.after.of(size + found, size) + size;
    for (std::size_t k = 0; k < found; ++k) {
      positions[k] = static_cast<std::uint32_t>(begin + indices[k]);
    }
    for (std::size_t k = 0; k < found; ++k) before[k] = base[indices[k]];
    for (std::size_t k = 0; k < found; ++k) after[k] = target[indices[k]];
    size += found;
  }
  changes.size = size;
}

// Returns the bit width of a magnitude, which is not 0.
template <typename Bits>
DELTAWIRE_INLINE std::uint8_t width_of(Bits magnitude) {
  if constexpr (sizeof(Bits) <= 2) {
    // The exponent of the number as a float, which vector units can do.
    const float number = static_cast<float>(static_cast<int>(magnitude));
    return static_cast<std::uint8_t>((std::bit_cast<std::uint32_t>(number) >> 23) - 126);
  } else {
    return static_cast<std::uint8_t>(std::bit_width(magnitude));
  }
}

// Computes classes, magnitudes, lengths and falls; returns the largest exponent.
template <typename Path, typename Bits>
DELTAWIRE_INLINE unsigned measure(Layout layout, const Bits* after, Changes<Bits>& changes) {
  changes.complete();
  const bool floats = layout.exponent != 0;
  const Bits mask = Bits((Bits{1} << layout.exponent) - 1);
  const Bits* before = changes.before.get();
  Bits* magnitudes = changes.magnitudes.get();
  std::uint8_t* lengths = changes.lengths.get();
  std::uint8_t* falls = changes.classes.get();  // temporarily
  Bits top = 0;
  for (std::size_t k = 0; k < changes.size; ++k) {
    const Bits step = Bits(ordered(after[k], floats) - ordered(before[k], floats));
    const Bits fall = all_if_negative(step);
    magnitudes[k] = Bits(Bits(step ^ fall) - fall);
    falls[k] = static_cast<std::uint8_t>(fall);
  }
  for (std::size_t k = 0; k < changes.size; ++k) {
    top = std::max(top, Bits(Bits(before[k] >> layout.mantissa) & mask));
  }
  std::fill_n(falls + changes.size, kGroup, std::uint8_t{0});
  for (std::size_t k = 0; k < changes.size; k += kGroup) {
    changes.falls.get()[k / kGroup] = Path::greater(falls + k, 0);
  }
  for (std::size_t k = 0; k < changes.size; ++k) {
    lengths[k] = width_of(magnitudes[k]);
  }
  std::fill_n(lengths + changes.size, kGroup, std::uint8_t{0});
  classes_of(before, changes.size, layout, static_cast<unsigned>(top), changes.classes.get());
  return static_cast<unsigned>(top);
}

// Counts the changed elements of each class, and estimates those that do not change from every
// `stride`-th group. Half an element is added to that sample: a class without a single one in it
// may have some, and each would cost 15 bits if the odds ruled them out.
template <typename Path, typename Bits>
DELTAWIRE_INLINE Odds flag_odds(const Block<Bits>& block, unsigned top,
                                const Changes<Bits>& changes, const std::uint64_t* flags) {
  ByContext counts{}, sampled{};
  tally<Path>(changes.classes.get(), nullptr, changes.size, counts);
  const std::size_t groups = words_for(block.count);
  const std::size_t stride = 1 + groups / kSampled;
  std::uint8_t classes[kGroup];
  for (std::size_t g = 0; g < groups; g += stride) {
    const std::size_t here = std::min(kGroup, block.count - g * kGroup);
    classes_of(block.base + g * kGroup, here, block.layout, top, classes);
    tally<Path>(classes, flags + g, here, sampled);
  }
  for (unsigned context = 0; context < kContexts; ++context) {
    const std::uint64_t unchanged = sampled[context].total - sampled[context].ones;
    counts[context].ones = counts[context].total;
    counts[context].total += unchanged * stride + stride / 2;
  }
  return odds_from(counts);
}

// Writes each sign as one bit: whether it is the one that the column's memory expects.
template <typename Path, typename Bits>
DELTAWIRE_INLINE Odds put_signs(PlaneWriter& writer, const Block<Bits>& block, unsigned lanes,
                                Scratch<Bits>& scratch) {
  const Changes<Bits>& changes = scratch.changes;
  const std::size_t size = changes.size;
  const std::uint64_t* falls = changes.falls.get();
  std::uint8_t* contexts = scratch.contexts.of(size + kGroup);
  std::uint64_t* bits = scratch.bits.of(words_for(size));
  std::fill_n(bits, words_for(size), 0);
  scratch.memory.start(block.columns, block.count, changes.positions.get(), size);
  for (std::size_t step = (size + lanes - 1) / lanes; step-- > 0;) {
    const std::size_t begin = step * lanes, end = std::min(begin + lanes, size);
    const std::uint64_t expected = scratch.memory.expect(begin, end, contexts + begin);
    const std::uint64_t all = ~std::uint64_t{0} >> (kGroup - (end - begin));
    const std::uint64_t fall = falls[begin / kGroup] >> (begin % kGroup) & all;
    bits[begin / kGroup] |= (fall ^ expected) << (begin % kGroup);
    scratch.memory.learn(begin, end, fall);
  }
  return put_plane<Path>(writer, contexts, bits, size);
}

// Writes the second highest bit of each magnitude that has one, with its length as context, and the
// lower bits unmodeled.
template <typename Path, typename Bits>
DELTAWIRE_INLINE Odds put_details(PlaneWriter& writer, const std::vector<std::uint32_t>& longer,
                                  Scratch<Bits>& scratch, BitPacker& packer) {
  std::uint8_t* contexts = scratch.contexts.of(longer.size() + kGroup);
  std::uint64_t* bits = scratch.bits.of(words_for(longer.size()) + 1);
  std::fill_n(bits, words_for(longer.size()), 0);
  for (std::size_t j = 0; j < longer.size(); ++j) {
    const unsigned length = scratch.changes.lengths.get()[longer[j]];
    const std::uint64_t magnitude = scratch.changes.magnitudes.get()[longer[j]];
    contexts[j] = static_cast<std::uint8_t>(std::min(length, kContexts - 1));
    bits[j / kGroup] |= (magnitude >> (length - 2) & 1) << (j % kGroup);
    packer.put(magnitude & ((std::uint64_t{1} << (length - 2)) - 1), length - 2);
  }
  return put_plane<Path>(writer, contexts, bits, longer.size());
}

// Plane b marks the changes longer than b bits among those of b bits or more. The plane of the
// greatest length would have no ones and is omitted. `longer` holds the changes of two bits or
// more; all planes but the first cover only those.
template <typename Path, typename Bits>
DELTAWIRE_INLINE std::vector<Odds> put_lengths(PlaneWriter& writer,
                                               const std::vector<std::uint32_t>& longer,
                                               Scratch<Bits>& scratch) {
  const Changes<Bits>& changes = scratch.changes;
  const std::uint8_t* lengths = changes.lengths.get();
  std::uint8_t longest = 1;
  for (const std::uint32_t k : longer) longest = std::max(longest, lengths[k]);
  std::vector<Odds> planes(longest - 1U);
  for (unsigned b = longest - 1U; b > 1; --b) {
    std::uint8_t* contexts = scratch.contexts.of(longer.size() + kGroup);
    std::uint64_t* bits = scratch.bits.of(words_for(longer.size()) + 1);
    std::fill_n(bits, words_for(longer.size()), 0);
    std::size_t size = 0;
    for (const std::uint32_t k : longer) {
      contexts[size] = changes.classes.get()[k];
      bits[size / kGroup] |= std::uint64_t{lengths[k] > b} << (size % kGroup);
      size += lengths[k] >= b;
    }
    planes[b - 1] = put_plane<Path>(writer, contexts, bits, size);
  }
  if (planes.empty()) return planes;
  std::uint64_t* bits = scratch.bits.of(words_for(changes.size));
  for (std::size_t k = 0; k < changes.size; k += kGroup) {
    bits[k / kGroup] = Path::greater(lengths + k, 1);
  }
  planes[0] = put_plane<Path>(writer, changes.classes.get(), bits, changes.size);
  return planes;
}

void put_number(std::vector<std::uint8_t>& out, std::size_t number, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) {
    out.push_back(static_cast<std::uint8_t>(number >> (8 * i)));
  }
}

template <typename Path, typename Bits>
DELTAWIRE_INLINE std::vector<std::uint8_t> encode_block(const Block<Bits>& block,
                                                        Scratch<Bits>& scratch) {
  Changes<Bits>& changes = scratch.changes;
  gather<Path>(block, scratch);
  std::vector<std::uint8_t> out;
  put_number(out, changes.size, 4);
  if (changes.size == 0) return out;
  const unsigned top = measure<Path>(block.layout, scratch.after.get(), changes);
  std::vector<std::uint32_t> longer;
  for (std::size_t k = 0; k < changes.size; k += kGroup) {
    const std::uint64_t mask = Path::greater(changes.lengths.get() + k, 1);
    each_bit(&mask, 1, [&](std::size_t i) { longer.push_back(static_cast<std::uint32_t>(k + i)); });
  }
  const unsigned lanes = block.layout.is_small() ? small_lanes_for(block.count, changes.size)
                                                 : lanes_for(block.count);
  PlaneWriter writer(lanes, Path::kSimd, scratch.words);
  BitPacker packer;
  const Odds signs = put_signs<Path>(writer, block, lanes, scratch);
  const Odds details = put_details<Path>(writer, longer, scratch, packer);
  const std::vector<Odds> lengths = put_lengths<Path>(writer, longer, scratch);
  const Odds flags = flag_odds<Path>(block, top, changes, scratch.changed.get());
  std::uint8_t classes[kChunk];
  for (std::size_t begin = 0; begin < block.count; begin += kChunk) {
    const std::size_t end = std::min(begin + kChunk, block.count);
    classes_of(block.base + begin, end - begin, block.layout, top, classes);
    writer.put(classes, scratch.changed.get(), begin, end, flags);
  }
  put_number(out, top, 2);
  put_number(out, lengths.size(), 1);
  flags.write(out);
  for (const Odds& odds : lengths) odds.write(out);
  details.write(out);
  signs.write(out);
  const std::vector<std::uint8_t>& raw = packer.finish();
  put_number(out, raw.size(), 4);
  out.reserve(out.size() + raw.size() + writer.bytes());
  out.insert(out.end(), raw.begin(), raw.end());
  writer.finish(out);
  return out;
}

// One function for each path, so that the compiler may use its instructions throughout.
template <typename Bits>
std::vector<std::uint8_t> encode_portable(const Block<Bits>& block, Scratch<Bits>& scratch) {
  return encode_block<PortablePath>(block, scratch);
}

#ifdef DELTAWIRE_X86
template <typename Bits>
DELTAWIRE_AVX512 std::vector<std::uint8_t> encode_avx512(const Block<Bits>& block,
                                                         Scratch<Bits>& scratch) {
  return encode_block<Avx512Path>(block, scratch);
}

template <typename Bits>
DELTAWIRE_AVX2 std::vector<std::uint8_t> encode_avx2(const Block<Bits>& block,
                                                     Scratch<Bits>& scratch) {
  return encode_block<Avx2Path>(block, scratch);
}
#endif

}  // namespace

template <typename Bits>
Encoded encode(const Bits* base, const Bits* target, Shape shape, Layout layout,
               const DigestOf* digest_of, unsigned threads) {
  const Simd simd = simd_path();
  auto encoder = encode_portable<Bits>;
#ifdef DELTAWIRE_X86
  if (simd == Simd::avx512) encoder = encode_avx512<Bits>;
  if (simd == Simd::avx2) encoder = encode_avx2<Bits>;
#endif
  Encoded result;
  result.blocks.resize(shape.blocks());
  std::vector<std::size_t> changed(shape.blocks());
  std::vector<Lanes> moved(shape.blocks());
  parallel<Scratch<Bits>>(shape.blocks(), threads, [&](std::size_t b, Scratch<Bits>& scratch) {
    const std::size_t first = b * shape.block();
    const std::size_t count = std::min(shape.block(), shape.count - first);
    result.blocks[b] =
        encoder({base + first, target + first, count, shape.columns, layout}, scratch);
    const Changes<Bits>& changes = scratch.changes;
    changed[b] = changes.size;
    if (digest_of != nullptr) {
      moved[b] = digest_moves(changes.positions.get(), changes.before.get(), scratch.after.get(),
                              changes.size, digest_of->key, digest_of->start + first);
    }
  });
  for (std::size_t b = 0; b < shape.blocks(); ++b) {
    result.changed += changed[b];
    result.moved.lane0 += moved[b].lane0;
    result.moved.lane1 += moved[b].lane1;
  }
  return result;
}

#define DELTAWIRE_INSTANTIATE(Bits)                                                    \
  template Encoded encode<Bits>(const Bits*, const Bits*, Shape, Layout, const DigestOf*, unsigned);
DELTAWIRE_INSTANTIATE(std::uint8_t)
DELTAWIRE_INSTANTIATE(std::uint16_t)
DELTAWIRE_INSTANTIATE(std::uint32_t)
DELTAWIRE_INSTANTIATE(std::uint64_t)
#undef DELTAWIRE_INSTANTIATE

}  // namespace deltawire
