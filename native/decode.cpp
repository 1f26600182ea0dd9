#include <atomic>
#include <bit>

#include "changes.hpp"
#include "delta.hpp"
#include "elements.hpp"
#include "packing.hpp"
#include "parallel.hpp"
#include "planes.hpp"

namespace deltawire {
namespace {

bool get_number(const std::uint8_t*& at, const std::uint8_t* end, std::size_t bytes,
                std::uint32_t& number) {
  if (static_cast<std::size_t>(end - at) < bytes) return false;
  number = 0;
  for (std::size_t i = 0; i < bytes; ++i) number |= std::uint32_t{*at++} << (8 * i);
  return true;
}

// Reads how many elements a block changes; returns false if the block is too short for it.
bool read_changed(const std::uint8_t* bytes, std::size_t size, std::size_t& changed) {
  std::uint32_t number;
  if (!get_number(bytes, bytes + size, 4, number)) return false;
  changed = number;
  return true;
}

struct Header {
  std::uint32_t changed = 0, top = 0, planes = 0, raw = 0;
  Odds flags, details, signs;
  std::vector<Odds> lengths;

  bool read(const std::uint8_t*& at, const std::uint8_t* end, unsigned width) {
    if (!get_number(at, end, 4, changed) || !get_number(at, end, 2, top) ||
        !get_number(at, end, 1, planes) || planes >= width || !flags.read(at, end)) {
      return false;
    }
    // Class 0 lies above `top`, so none of its elements changes.
    if (flags.ones[0] != 0) return false;
    lengths.resize(planes);
    for (Odds& odds : lengths) {
      if (!odds.read(at, end)) return false;
    }
    return details.read(at, end) && signs.read(at, end) && get_number(at, end, 4, raw) &&
           raw <= static_cast<std::size_t>(end - at);
  }
};

// The buffers of one decoding thread, reused from block to block.
template <typename Bits>
struct Scratch {
  Changes<Bits> changes;
  Room<std::uint64_t> bits;
  Room<std::uint8_t> contexts;
  SignMemory memory;
};

template <typename Bits>
struct Block {
  const std::uint8_t* bytes;
  std::size_t size;
  const Bits* base;
  std::size_t count;
  std::size_t columns;
  Layout layout;
};

// Reads positions, old bits and classes of the changes; returns false if their number is not the
// block's stated one.
template <typename Path, typename Bits>
DELTAWIRE_INLINE bool take_flags(PlaneReader& reader, const Header& header,
                                 const Block<Bits>& block, Changes<Bits>& changes) {
  std::uint8_t classes[kChunk];
  std::uint64_t changed[kChunk / kGroup];
  std::uint16_t indices[kChunk + kGroup];
  std::size_t room = changes.size;
  for (std::size_t begin = (block.count - 1) / kChunk * kChunk;; begin -= kChunk) {
    const std::size_t here = std::min(kChunk, block.count - begin);
    const Bits* base = block.base + begin;
    classes_of(base, here, block.layout, header.top, classes);
    std::fill(std::begin(changed), std::end(changed), 0);
    reader.take(classes, changed, 0, here, header.flags);
    std::size_t found = 0;
    for (std::size_t g = 0; g < kChunk / kGroup; ++g) {
      found += Path::indices(changed[g], g * kGroup, indices + found);
    }
    if (found > room) return false;
    room -= found;
    std::uint32_t* positions = changes.positions.get() + room;
    Bits* before = changes.before.get() + room;
    std::uint8_t* of = changes.classes.get() + room;
    for (std::size_t k = 0; k < found; ++k) {
      positions[k] = static_cast<std::uint32_t>(begin + indices[k]);
    }
    for (std::size_t k = 0; k < found; ++k) before[k] = base[indices[k]];
    for (std::size_t k = 0; k < found; ++k) of[k] = classes[indices[k]];
    if (begin == 0) return room == 0;
  }
}

// Reads the lengths of the magnitudes; returns the changes of two bits or more.
template <typename Bits>
std::vector<std::uint32_t> take_lengths(PlaneReader& reader, const Header& header,
                                        Scratch<Bits>& scratch) {
  Changes<Bits>& changes = scratch.changes;
  std::uint8_t* lengths = changes.lengths.get();
  std::fill_n(lengths, changes.size, std::uint8_t{1});
  std::vector<std::uint32_t> all, longer;
  for (std::size_t b = 0; b < header.lengths.size(); ++b) {
    const std::size_t size = b == 0 ? changes.size : longer.size();
    if (size == 0) break;
    std::uint64_t* bits = scratch.bits.of(words_for(size));
    std::fill_n(bits, words_for(size), 0);
    const std::uint8_t* contexts = changes.classes.get();
    if (b > 0) {
      std::uint8_t* gathered = scratch.contexts.of(size + kGroup);
      for (std::size_t j = 0; j < size; ++j) gathered[j] = changes.classes.get()[longer[j]];
      contexts = gathered;
    }
    reader.take(contexts, bits, 0, size, header.lengths[b]);
    std::vector<std::uint32_t> next;
    each_bit(bits, words_for(size), [&](std::size_t j) {
      next.push_back(b == 0 ? static_cast<std::uint32_t>(j) : longer[j]);
    });
    for (const std::uint32_t k : next) ++lengths[k];
    longer = std::move(next);
    if (b == 0) all = longer;
  }
  return all;
}

template <typename Bits>
bool take_details(PlaneReader& reader, const Header& header, const std::uint8_t* raw,
                  const std::vector<std::uint32_t>& longer, Scratch<Bits>& scratch) {
  Changes<Bits>& changes = scratch.changes;
  const std::uint8_t* lengths = changes.lengths.get();
  constexpr auto kMost = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  std::fill_n(changes.magnitudes.get(), changes.size, Bits{1});
  std::uint8_t* contexts = scratch.contexts.of(longer.size() + kGroup);
  std::uint64_t* bits = scratch.bits.of(words_for(longer.size()) + 1);
  std::fill_n(bits, words_for(longer.size()) + 1, 0);
  for (std::size_t j = 0; j < longer.size(); ++j) {
    contexts[j] = static_cast<std::uint8_t>(std::min<unsigned>(lengths[longer[j]], kContexts - 1));
  }
  reader.take(contexts, bits, 0, longer.size(), header.details);
  BitTaker taker(raw, header.raw);
  for (std::size_t j = 0; j < longer.size() && taker.ok(); ++j) {
    const unsigned rest = lengths[longer[j]] - 2U;
    const std::uint64_t high = 2 | (bits[j / kGroup] >> (j % kGroup) & 1);
    const auto magnitude = static_cast<Bits>(high << rest | taker.take(rest));
    if (magnitude > kMost) return false;
    changes.magnitudes.get()[longer[j]] = magnitude;
  }
  return taker.finished();
}

template <typename Bits>
void take_signs(PlaneReader& reader, const Odds& odds, unsigned lanes, const Block<Bits>& block,
                Scratch<Bits>& scratch) {
  Changes<Bits>& changes = scratch.changes;
  std::uint64_t* falls = changes.falls.get();
  scratch.memory.start(block.columns, block.count, changes.positions.get(), changes.size);
  std::uint8_t contexts[kMostLanes];
  for (std::size_t step = (changes.size + lanes - 1) / lanes; step-- > 0;) {
    const std::size_t begin = step * lanes, end = std::min(begin + lanes, changes.size);
    const std::uint64_t expected = scratch.memory.expect(begin, end, contexts);
    std::uint64_t& word = falls[begin / kGroup];
    reader.take(contexts, falls, begin, end, odds);
    word ^= expected << (begin % kGroup);
    scratch.memory.learn(begin, end, word >> (begin % kGroup));
  }
}

// Decodes a block and leaves each change's new bits in `magnitudes`. Returns false if the bytes are
// not a block for this base.
template <typename Path, typename Bits>
DELTAWIRE_INLINE bool decode_block(const Block<Bits>& block, Scratch<Bits>& scratch) {
  Changes<Bits>& changes = scratch.changes;
  const std::uint8_t* at = block.bytes;
  const std::uint8_t* end = at + block.size;
  if (!read_changed(at, block.size, changes.size) || changes.size > block.count) return false;
  if (changes.size == 0) return block.size == 4;
  Header header;
  if (!header.read(at, end, 8 * sizeof(Bits)) || header.top >> block.layout.exponent != 0) {
    return false;
  }
  const std::uint8_t* raw = at;
  at += header.raw;
  const unsigned lanes = block.layout.is_small() ? small_lanes_for(block.count, changes.size)
                                                 : lanes_for(block.count);
  PlaneReader reader(at, static_cast<std::size_t>(end - at), lanes, Path::kSimd);
  if (!reader.ok()) return false;
  changes.reserve(changes.size, 0);
  changes.complete();
  if (!take_flags<Path>(reader, header, block, changes)) return false;
  const std::vector<std::uint32_t> longer = take_lengths(reader, header, scratch);
  if (!take_details(reader, header, raw, longer, scratch)) return false;
  take_signs(reader, header.signs, lanes, block, scratch);
  if (!reader.finished()) return false;
  const bool floats = block.layout.exponent != 0;
  const Bits* before = changes.before.get();
  Bits* after = changes.magnitudes.get();
  const std::uint64_t* falls = changes.falls.get();
  for (std::size_t k = 0; k < changes.size; ++k) {
    const auto fall = Bits(Bits{0} - Bits(falls[k / kGroup] >> (k % kGroup) & 1));
    const Bits step = Bits(Bits(after[k] ^ fall) - fall);
    after[k] = unordered(Bits(ordered(before[k], floats) + step), floats);
  }
  return true;
}

// One function for each path, so that the compiler may use its instructions throughout.
template <typename Bits>
bool decode_portable(const Block<Bits>& block, Scratch<Bits>& scratch) {
  return decode_block<PortablePath>(block, scratch);
}

#ifdef DELTAWIRE_X86
template <typename Bits>
DELTAWIRE_AVX512 bool decode_avx512(const Block<Bits>& block, Scratch<Bits>& scratch) {
  return decode_block<Avx512Path>(block, scratch);
}

template <typename Bits>
DELTAWIRE_AVX2 bool decode_avx2(const Block<Bits>& block, Scratch<Bits>& scratch) {
  return decode_block<Avx2Path>(block, scratch);
}
#endif

// Calls use(section, changes) for each block; the new bits are in the changes' magnitudes.
template <typename Bits, typename Use>
bool decode_each(const std::vector<Section>& sections, const Bits* base, std::size_t columns,
                 Layout layout, unsigned threads, const Use& use) {
  if (!layout.fits(8 * sizeof(Bits))) return false;
  const Simd simd = simd_path();
  auto decoder = decode_portable<Bits>;
#ifdef DELTAWIRE_X86
  if (simd == Simd::avx512) decoder = decode_avx512<Bits>;
  if (simd == Simd::avx2) decoder = decode_avx2<Bits>;
#endif
  std::atomic<bool> sound{true};
  parallel<Scratch<Bits>>(sections.size(), threads, [&](std::size_t s, Scratch<Bits>& scratch) {
    const Section& section = sections[s];
    const Block<Bits> block{section.bytes, section.size, base + section.first,
                            section.count, columns,      layout};
    if (sound && decoder(block, scratch)) {
      use(section, scratch.changes);
    } else {
      sound = false;
    }
  });
  return sound;
}

}  // namespace

Sections sections_of(const Body& body, Shape shape, std::size_t first, std::size_t last) {
  if (shape.columns > kBlock || body.blocks != shape.blocks() || first > last ||
      last > body.blocks) {
    throw std::invalid_argument("the lengths are not those of this base's blocks");
  }
  Sections sections;
  body.each([&](std::size_t b, const std::uint8_t* bytes, std::size_t size) {
    if (b < first || b >= last) return;
    const std::size_t from = b * shape.block();
    Section section{bytes, size, from, std::min(shape.block(), shape.count - from),
                    sections.changed, 0};
    if (!read_changed(bytes, size, section.changed) || section.changed > section.count) {
      throw std::invalid_argument("a block that is shorter, or changes more, than a block can");
    }
    sections.changed += section.changed;
    sections.all.push_back(section);
  });
  return sections;
}

template <typename Bits>
bool decode(const std::vector<Section>& sections, const Bits* base, std::size_t columns,
            Layout layout, unsigned threads, std::int64_t* positions, Bits* bits,
            const DigestOf* digest_of, Lanes* moved) {
  std::vector<Lanes> gains(digest_of == nullptr ? 0 : sections.size());
  const auto use = [&](const Section& section, const Changes<Bits>& changes) {
    const auto from = static_cast<std::int64_t>(section.first);
    for (std::size_t k = 0; k < changes.size; ++k) {
      positions[section.room + k] = from + changes.positions.get()[k];
    }
    std::copy_n(changes.magnitudes.get(), changes.size, bits + section.room);
    if (digest_of != nullptr) {
      gains[static_cast<std::size_t>(&section - sections.data())] =
          digest_moves(changes.positions.get(), changes.before.get(), changes.magnitudes.get(),
                       changes.size, digest_of->key, digest_of->start + section.first);
    }
  };
  const bool sound = decode_each(sections, base, columns, layout, threads, use);
  for (const Lanes& gain : gains) {
    moved->lane0 += gain.lane0;
    moved->lane1 += gain.lane1;
  }
  return sound;
}

template <typename Bits>
bool advance(const std::vector<Section>& sections, Bits* base, std::size_t columns, Layout layout,
             unsigned threads) {
  const auto use = [&](const Section& section, const Changes<Bits>& changes) {
    Bits* block = base + section.first;
    const std::uint32_t* positions = changes.positions.get();
    const Bits* after = changes.magnitudes.get();
    for (std::size_t k = 0; k < changes.size; ++k) block[positions[k]] = after[k];
  };
  return decode_each<Bits>(sections, base, columns, layout, threads, use);
}

#define DELTAWIRE_INSTANTIATE(Bits)                                                         \
  template bool decode<Bits>(const std::vector<Section>&, const Bits*, std::size_t, Layout, \
                             unsigned, std::int64_t*, Bits*, const DigestOf*, Lanes*);      \
  template bool advance<Bits>(const std::vector<Section>&, Bits*, std::size_t, Layout, unsigned);
DELTAWIRE_INSTANTIATE(std::uint8_t)
DELTAWIRE_INSTANTIATE(std::uint16_t)
DELTAWIRE_INSTANTIATE(std::uint32_t)
DELTAWIRE_INSTANTIATE(std::uint64_t)
#undef DELTAWIRE_INSTANTIATE

}  // namespace deltawire
