// Lossless deltas, coded per class of the old weight; src/deltawire/codec/reference.py is the twin.
//
// Both sides hold the old weight. How often an optimizer step moves a float's published bits
// depends on the size of its unit in the last place, so on its exponent, and each class of
// exponents has its own odds. src/deltawire/codec/delta.py has the format. Blocks are
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

// How an element's bits divide: `exponent` bits above `mantissa` bits below a sign bit. Both are 0
// for integers, which are one class.
struct Layout {
  unsigned mantissa = 0;
  unsigned exponent = 0;

  // Whether an element of so many bits divides that way.
  bool fits(unsigned width) const {
    return (mantissa == 0 && exponent == 0) ||
           (exponent > 0 && exponent <= 11 && mantissa < width &&
            mantissa + exponent + 1 == width);
  }
};

// A tensor's form as the codec sees it: `columns` is the length of its rows, 0 if it has none.
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
  Lanes moved;  // what the digest gains
};

// Of which tensor the digest's gain is wanted: its key, and the position of the first element.
struct DigestOf {
  std::uint64_t key;
  std::uint64_t start;
};

// `digest_of` may be null; then `moved` is zero.
template <typename Bits>
Encoded encode(const Bits* base, const Bits* target, Shape shape, Layout layout,
               const DigestOf* digest_of, unsigned threads);

// One block of a payload: where its bytes lie, which elements it is of, and where its changes go.
struct Section {
  const std::uint8_t* bytes;
  std::size_t size;
  std::size_t first;    // of its elements, in the base
  std::size_t count;    // of elements
  std::size_t room;     // changes of the blocks before it
  std::size_t changed;  // as its first four bytes say
};

struct Sections {
  std::vector<Section> all;
  std::size_t changed = 0;
};

// The blocks `first` to `last` of a body for a base of such a shape. Throws std::invalid_argument
// for a body that is not of such blocks; the memory that is taken depends on the shape only.
Sections sections_of(const Body& body, Shape shape, std::size_t first, std::size_t last);

// The changes of some blocks, ascending, into `positions` and `bits`, and with `digest_of` what the
// digest gains by them into `moved`. False if one of them is not a block for such a base; what was
// written by then means nothing.
template <typename Bits>
bool decode(const std::vector<Section>& sections, const Bits* base, std::size_t columns,
            Layout layout, unsigned threads, std::int64_t* positions, Bits* bits,
            const DigestOf* digest_of = nullptr, Lanes* moved = nullptr);

// The same straight into the base. False may leave some blocks advanced.
template <typename Bits>
bool advance(const std::vector<Section>& sections, Bits* base, std::size_t columns, Layout layout,
             unsigned threads);

}  // namespace deltawire
