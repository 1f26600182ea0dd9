// Weights as bf16 from small codes: table[code] × scale, rounded once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deltawire {

// Codes of 4 bits, two to a byte, the first in the low half. `group` consecutive codes, an even
// number, share a scale. `values` has 16 entries.
void dequantize4(const std::uint8_t* codes, const float* values, const float* scales,
                 std::size_t groups, std::size_t group, unsigned threads, std::uint16_t* out);

// Codes of 8 bits in a matrix of `rows` × `columns`, row by row. A block of `block_rows` ×
// `block_columns` shares a scale; blocks at the edges may be smaller. `values` has 256 entries.
void dequantize8(const std::uint8_t* codes, const float* values, const float* scales,
                 std::size_t rows, std::size_t columns, std::size_t block_rows,
                 std::size_t block_columns, unsigned threads, std::uint16_t* out);

}  // namespace deltawire
