// The sizes that the format fixes: the elements of a block and the lanes that code it.
//
// Only fuzz targets are built with smaller ones, so that a few thousand elements make several
// blocks of every number of lanes. Payloads of other sizes are another format.
#pragma once

#include <cstddef>

namespace deltawire {

#ifdef DELTAWIRE_SMALL_SIZES
constexpr std::size_t kBlock = std::size_t{1} << 13;
constexpr std::size_t kWholeBlock = std::size_t{1} << 13;
constexpr std::size_t kSixteenLanesFrom = std::size_t{1} << 8;
constexpr std::size_t kSixtyFourLanesFrom = std::size_t{1} << 10;
constexpr std::size_t kSmallLanesFrom = 32;
constexpr std::size_t kSampled = 48;
#else
constexpr std::size_t kBlock = std::size_t{1} << 22;       // a delta's elements per block, at most
constexpr std::size_t kWholeBlock = std::size_t{1} << 20;  // an anchor's elements per block
constexpr std::size_t kSixteenLanesFrom = std::size_t{1} << 15;
constexpr std::size_t kSixtyFourLanesFrom = std::size_t{1} << 20;
constexpr std::size_t kSmallLanesFrom = 1024;  // changed 4-bit codes of a block
constexpr std::size_t kSampled = 2048;  // groups at which a delta's classes are counted
#endif

// Returns the number of lanes for a block: each lane costs two bytes, and speed needs many.
constexpr unsigned lanes_for(std::size_t elements) {
  return elements >= kSixtyFourLanesFrom ? 64 : elements >= kSixteenLanesFrom ? 16 : 1;
}

// Returns the number of lanes for a block of 4-bit codes. Few of them change, so that the bytes of
// many lanes would be much of the block.
constexpr unsigned small_lanes_for(std::size_t elements, std::size_t changes) {
  return elements >= kSixtyFourLanesFrom || changes >= kSmallLanesFrom ? 16 : 1;
}

}  // namespace deltawire
