// Lossless deltas, coded per class of the old weight; src/deltawire/codec/reference.py is the twin.
//
// Both sides hold the old weight. The probability that an optimizer step changes a float's
// published bits depends on the size of its unit in the last place, so on its exponent; each class
// of exponents has separate odds. src/deltawire/codec/delta.py describes the format. Blocks are
// independent of each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "body.hpp"
#include "digest.hpp"
#include "simd.hpp"
#include "sizes.hpp"

namespace deltawire {

// The layout of an element's bits: a sign bit, then `exponent` bits, then `mantissa` bits. Both are
// 0 for integers, which are one class. A byte that holds a number below 16 has the layout (0, 4): its
// class follows from the number itself.
struct Layout {
  unsigned mantissa = 0;
  unsigned exponent = 0;

  // Returns whether elements are numbers below 16, one in a byte.
  bool is_small() const { return mantissa == 0 && exponent == 4; }

  // Returns whether an element of `width` bits can have this layout.
  bool fits(unsigned width) const {
    return (mantissa == 0 && exponent == 0) || (is_small() && width == 8) ||
           (exponent > 0 && exponent <= 11 && mantissa < width &&
            mantissa + exponent + 1 == width);
  }
};

// The shape of a tensor for the codec: `columns` is the length of its rows, 0 if it has none.
struct Shape {
  std::size_t count = 0;
  std::size_t columns = 0;

  // Elements of each block but the last: whole rows, if any fit.
  std::size_t block() const {
    return columns == 0 ? kBlock : kBlock / columns * columns;
  }
  std::size_t blocks() const { return (count + block() - 1) / block(); }
};

struct Encoded {
  std::vector<std::vector<std::uint8_t>> blocks;
  std::uint64_t changed = 0;
  Lanes moved;  // the change to the digest
};

// The tensor for which to compute the digest's change: its key, and the first element's position.
struct DigestOf {
  std::uint64_t key;
  std::uint64_t start;
};

// `digest_of` may be null; then `moved` is zero.
template <typename Bits>
Encoded encode(const Bits* base, const Bits* target, Shape shape, Layout layout,
               const DigestOf* digest_of, unsigned threads);

// One block of a payload: its bytes, the elements that it covers, and the position of its changes.
struct Section {
  const std::uint8_t* bytes;
  std::size_t size;
  std::size_t first;    // its first element in the base
  std::size_t count;    // number of elements
  std::size_t room;     // changes of the blocks before it
  std::size_t changed;  // stated in its first four bytes
};

struct Sections {
  std::vector<Section> all;
  std::size_t changed = 0;
};

// Returns the blocks `first` to `last` of a body for a base of this shape. Throws
// std::invalid_argument for a body of other blocks; the memory taken depends on the shape only.
Sections sections_of(const Body& body, Shape shape, std::size_t first, std::size_t last);

// Decodes the changes of some blocks, ascending, into `positions` and `bits`, and with `digest_of`
// their change to the digest into `moved`. Returns false if one is not a block for this base; the
// outputs are then undefined.
template <typename Bits>
bool decode(const std::vector<Section>& sections, const Bits* base, std::size_t columns,
            Layout layout, unsigned threads, std::int64_t* positions, Bits* bits,
            const DigestOf* digest_of = nullptr, Lanes* moved = nullptr);

// Decodes straight into the base. If it returns false, some blocks may already be advanced.
template <typename Bits>
bool advance(const std::vector<Section>& sections, Bits* base, std::size_t columns, Layout layout,
             unsigned threads);

}  // namespace deltawire
