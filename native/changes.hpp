// The gathered changed elements of a block, and a memory of the direction of each column.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "elements.hpp"
#include "room.hpp"

namespace deltawire {

// One entry per change, in element order. `lengths` are the bit widths of the magnitudes, `falls`
// is a bit mask, and every array has room for a group more than `size`.
template <typename Bits>
struct Changes {
  std::size_t size = 0;
  Room<std::uint32_t> positions;
  Room<Bits> before, magnitudes;
  Room<std::uint8_t> classes, lengths;
  Room<std::uint64_t> falls;

  // Makes room for `changes`; `positions` and `before` keep their first `keep` entries.
  void reserve(std::size_t changes, std::size_t keep) {
    positions.of(changes + kGroup, keep);
    before.of(changes + kGroup, keep);
  }

  // Makes room for `size` entries in the other arrays.
  void complete() {
    magnitudes.of(size + kGroup);
    classes.of(size + kGroup);
    lengths.of(size + kGroup);
    std::fill_n(falls.of(size / kGroup + 2), size / kGroup + 2, 0);
  }
};

// Tracks the direction in which each column has moved, from the block's end towards its start, as
// the reader learns it. The contexts of a step are fixed before any sign of the step is known.
class SignMemory {
 public:
  static constexpr int kLimit = 15;  // a column's count stays within ± this
  static constexpr unsigned kLastContext = 7;

  // Starts a block of `elements` with changes at `positions`; a longer row counts as one row.
  void start(std::size_t columns, std::size_t elements, const std::uint32_t* positions,
             std::size_t size) {
    columns = std::min(columns, elements);
    columns_ = columns;
    if (columns == 0) return;
    std::fill_n(held_.of(columns), columns, std::int8_t{0});
    std::uint32_t* places = places_.of(size);
    const auto length = static_cast<std::uint32_t>(columns);
    std::uint32_t row = 0;  // first element of the row
    for (std::size_t k = 0; k < size; ++k) {
      if (positions[k] - row >= length) row = positions[k] / length * length;
      places[k] = positions[k] - row;
    }
  }

  // Computes the contexts of changes `begin` to `end`, at most 64; returns the expected falls.
  std::uint64_t expect(std::size_t begin, std::size_t end, std::uint8_t* contexts) const {
    if (columns_ == 0) {
      std::fill(contexts, contexts + (end - begin), std::uint8_t{0});
      return 0;
    }
    const std::uint32_t* places = places_.get();
    const std::int8_t* held = held_.get();
    std::uint64_t expected = 0;
    for (std::size_t k = begin; k < end; ++k) {
      const int count = held[places[k]];
      contexts[k - begin] =
          static_cast<std::uint8_t>(std::min<unsigned>(std::abs(count), kLastContext));
      expected |= std::uint64_t{count < 0} << (k - begin);
    }
    return expected;
  }

  void learn(std::size_t begin, std::size_t end, std::uint64_t falls) {
    if (columns_ == 0) return;
    const std::uint32_t* places = places_.get();
    std::int8_t* held = held_.get();
    for (std::size_t k = begin; k < end; ++k, falls >>= 1) {
      std::int8_t& count = held[places[k]];
      const int next = count + 1 - 2 * static_cast<int>(falls & 1);
      count = static_cast<std::int8_t>(std::clamp(next, -kLimit, kLimit));
    }
  }

 private:
  std::size_t columns_ = 0;
  Room<std::uint32_t> places_;
  Room<std::int8_t> held_;
};

// Calls visit(i) for each set bit of a plane's words, ascending.
template <typename Visit>
DELTAWIRE_INLINE void each_bit(const std::uint64_t* words, std::size_t count, const Visit& visit) {
  for (std::size_t word = 0; word < count; ++word) {
    for (std::uint64_t left = words[word]; left != 0; left &= left - 1) {
      visit(word * kGroup + static_cast<std::size_t>(std::countr_zero(left)));
    }
  }
}

constexpr std::size_t words_for(std::size_t bits) { return (bits + kGroup - 1) / kGroup; }

}  // namespace deltawire
