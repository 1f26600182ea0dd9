// The sizes that the format fixes: how many elements a block has, and how many lanes code it.
//
// Fuzz targets are built with small ones, so that a few thousand elements are several blocks of
// every number of lanes. Nothing else may be: payloads of other sizes are another format.
#pragma once

#include <cstddef>

namespace deltawire {

#ifdef DELTAWIRE_SMALL_SIZES
constexpr std::size_t kBlock = std::size_t{1} << 13;
constexpr std::size_t kWholeBlock = std::size_t{1} << 13;
constexpr std::size_t kSixteenLanesFrom = std::size_t{1} << 8;
constexpr std::size_t kSixtyFourLanesFrom = std::size_t{1} << 10;
constexpr std::size_t kSampled = 48;
#else
constexpr std::size_t kBlock = std::size_t{1} << 22;       // elements of a delta's, at most
constexpr std::size_t kWholeBlock = std::size_t{1} << 20;  // elements of an anchor's
constexpr std::size_t kSixteenLanesFrom = std::size_t{1} << 15;
constexpr std::size_t kSixtyFourLanesFrom = std::size_t{1} << 20;
constexpr std::size_t kSampled = 2048;  // groups at which a delta's classes are counted
#endif

// How many lanes code a block of so many elements: each costs two bytes, and speed needs many.
constexpr unsigned lanes_for(std::size_t elements) {
  return elements >= kSixtyFourLanesFrom ? 64 : elements >= kSixteenLanesFrom ? 16 : 1;
}

}  // namespace deltawire
