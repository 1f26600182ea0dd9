#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "delta.hpp"
#include "dequantize.hpp"
#include "digest.hpp"
#include "exchange.hpp"
#include "simd.hpp"
#include "whole.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename Scalar>
using Vector = nb::ndarray<const Scalar, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename Scalar>
using Writable = nb::ndarray<Scalar, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using LanePair = std::pair<std::uint64_t, std::uint64_t>;

template <typename Bits>
LanePair digest(const Vector<Bits>& bits, std::uint64_t key, std::uint64_t start) {
  const nb::gil_scoped_release unlocked;
  const deltawire::Lanes sum = deltawire::digest(bits.data(), bits.size(), key, start);
  return {sum.lane0, sum.lane1};
}

std::optional<LanePair> digest_rounded(const Vector<float>& values, std::uint64_t key,
                                       std::uint64_t start) {
  const nb::gil_scoped_release unlocked;
  const deltawire::RoundedLanes found =
      deltawire::digest_rounded(values.data(), values.size(), key, start);
  if (!found.numbers) return std::nullopt;
  return LanePair{found.sum.lane0, found.sum.lane1};
}

template <typename Bits>
LanePair digest_at(const Vector<std::int64_t>& positions, const Vector<Bits>& bits,
                   std::uint64_t key) {
  if (positions.size() != bits.size()) {
    throw nb::value_error("positions and bits must have the same length");
  }
  const nb::gil_scoped_release unlocked;
  const deltawire::Lanes sum =
      deltawire::digest_at(positions.data(), bits.data(), bits.size(), key);
  return {sum.lane0, sum.lane1};
}

nb::list as_bytes(std::vector<std::vector<std::uint8_t>>& blocks) {
  nb::list list;
  for (std::vector<std::uint8_t>& block : blocks) {
    list.append(nb::bytes(block.data(), block.size()));
    std::vector<std::uint8_t>().swap(block);  // never the whole payload twice
  }
  return list;
}

// Returns a delta's blocks, its number of changes, and its change to the digest if `key` is given:
// that of a tensor with this key whose first element here has flat index `start`.
template <typename Bits>
nb::tuple encode(const Vector<Bits>& base, const Vector<Bits>& target, std::size_t columns,
                 unsigned mantissa, unsigned exponent, std::optional<std::uint64_t> key,
                 std::uint64_t start, unsigned threads) {
  if (base.size() != target.size() || columns > deltawire::kBlock ||
      !deltawire::Layout{mantissa, exponent}.fits(8 * sizeof(Bits))) {
    throw nb::value_error("base and target must be alike, and rows and layout such as there are");
  }
  deltawire::Encoded encoded;
  {
    const nb::gil_scoped_release unlocked;
    const deltawire::DigestOf digest_of{key.value_or(0), start};
    encoded = deltawire::encode(base.data(), target.data(), {base.size(), columns},
                                {mantissa, exponent}, key ? &digest_of : nullptr, threads);
  }
  return nb::make_tuple(as_bytes(encoded.blocks), encoded.changed, encoded.moved.lane0,
                        encoded.moved.lane1);
}

// Returns what `encode` returns for each of `parts`, tuples (base, target, columns, key, start) of
// one layout, all in one call on this thread: for many small ranges, the calls would take longer
// than the coding.
template <typename Bits>
nb::list encode_batch(const nb::list& parts, unsigned mantissa, unsigned exponent) {
  struct Part {
    Vector<Bits> base, target;
    std::size_t columns;
    deltawire::DigestOf digest_of;
    deltawire::Encoded encoded;
  };
  if (!deltawire::Layout{mantissa, exponent}.fits(8 * sizeof(Bits))) {
    throw nb::value_error("the layout does not fit the elements");
  }
  std::vector<Part> found;
  found.reserve(parts.size());
  for (const nb::handle each : parts) {
    const auto part = nb::cast<nb::tuple>(each);
    if (part.size() != 5) throw nb::value_error("a part has five members");
    found.push_back({nb::cast<Vector<Bits>>(part[0], false), nb::cast<Vector<Bits>>(part[1], false),
                     nb::cast<std::size_t>(part[2]),
                     {nb::cast<std::uint64_t>(part[3]), nb::cast<std::uint64_t>(part[4])},
                     {}});
    if (found.back().base.size() != found.back().target.size() ||
        found.back().columns > deltawire::kBlock) {
      throw nb::value_error("base and target must be alike, and rows such as there are");
    }
  }
  {
    const nb::gil_scoped_release unlocked;
    for (Part& part : found) {
      part.encoded = deltawire::encode(part.base.data(), part.target.data(),
                                       {part.base.size(), part.columns}, {mantissa, exponent},
                                       &part.digest_of, 1);
    }
  }
  nb::list encoded;
  for (Part& part : found) {
    encoded.append(nb::make_tuple(as_bytes(part.encoded.blocks), part.encoded.changed,
                                  part.encoded.moved.lane0, part.encoded.moved.lane1));
  }
  return encoded;
}

template <typename Scalar>
nb::ndarray<nb::numpy, Scalar, nb::ndim<1>> owned(std::unique_ptr<Scalar[]> data,
                                                  std::size_t size) {
  Scalar* raw = data.release();
  nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<Scalar*>(p); });
  return nb::ndarray<nb::numpy, Scalar, nb::ndim<1>>(raw, {size}, owner);
}

deltawire::Body body_of(const Vector<std::uint8_t>& bytes, const Vector<std::uint32_t>& lengths) {
  return {bytes.data(), bytes.size(), lengths.data(), lengths.size()};
}

constexpr const char* kNotOfThisBase = "the payload is not a delta for this base";

// Returns the positions, the new bits, and the change to the digest if `key` is given: that of a
// tensor with this key whose first element here has flat index `start`.
template <typename Bits>
nb::tuple decode(const Vector<std::uint8_t>& body, const Vector<std::uint32_t>& lengths,
                 const Vector<Bits>& base, std::size_t columns, unsigned mantissa,
                 unsigned exponent, std::size_t first, std::size_t last,
                 std::optional<std::uint64_t> key, std::uint64_t start, unsigned threads) {
  const deltawire::Sections sections =
      deltawire::sections_of(body_of(body, lengths), {base.size(), columns}, first, last);
  auto positions = std::make_unique_for_overwrite<std::int64_t[]>(sections.changed);
  auto bits = std::make_unique_for_overwrite<Bits[]>(sections.changed);
  deltawire::Lanes moved;
  bool sound;
  {
    const nb::gil_scoped_release unlocked;
    const deltawire::DigestOf digest_of{key.value_or(0), start};
    sound = deltawire::decode(sections.all, base.data(), columns, {mantissa, exponent}, threads,
                              positions.get(), bits.get(), key ? &digest_of : nullptr, &moved);
  }
  if (!sound) throw nb::value_error(kNotOfThisBase);
  return nb::make_tuple(owned(std::move(positions), sections.changed),
                        owned(std::move(bits), sections.changed), moved.lane0, moved.lane1);
}

template <typename Bits>
std::uint64_t advance(const Vector<std::uint8_t>& body, const Vector<std::uint32_t>& lengths,
                      const Writable<Bits>& base, std::size_t columns, unsigned mantissa,
                      unsigned exponent, unsigned threads) {
  const deltawire::Sections sections = deltawire::sections_of(
      body_of(body, lengths), {base.size(), columns}, 0, lengths.size());
  bool sound;
  {
    const nb::gil_scoped_release unlocked;
    sound = deltawire::advance(sections.all, base.data(), columns, {mantissa, exponent}, threads);
  }
  if (!sound) throw nb::value_error(kNotOfThisBase);
  return sections.changed;
}

template <typename Bits>
nb::list encode_whole(const Vector<Bits>& bits, unsigned low, unsigned width, unsigned threads) {
  const deltawire::Field field{low, width};
  if (!field.fits(8 * sizeof(Bits))) {
    throw nb::value_error("no such field in an element");
  }
  std::vector<std::vector<std::uint8_t>> blocks;
  {
    const nb::gil_scoped_release unlocked;
    blocks = deltawire::encode_whole(bits.data(), bits.size(), field, threads);
  }
  return as_bytes(blocks);
}

// Decodes a whole tensor into `bits`.
template <typename Bits>
void decode_whole(const Vector<std::uint8_t>& body, const Vector<std::uint32_t>& lengths,
                  const Writable<Bits>& bits, unsigned low, unsigned width, unsigned threads) {
  const nb::gil_scoped_release unlocked;
  deltawire::decode_whole(body_of(body, lengths), bits.size(), {low, width}, threads, bits.data());
}

// Exchanges bits in several arrays: changes `lasts[k - 1]` to `lasts[k]` are in `live[k]`. Returns
// 0 on success, 1 if `live[k]` did not hold `old`, 2 if it does not hold `fresh` afterwards; and k.
template <typename Bits>
std::pair<int, std::size_t> exchange(const std::vector<Writable<Bits>>& live,
                                     const Vector<std::int64_t>& lasts,
                                     const Vector<std::int64_t>& index, const Vector<Bits>& old,
                                     const Vector<Bits>& fresh, unsigned threads) {
  if (index.size() != old.size() || index.size() != fresh.size()) {
    throw nb::value_error("index, old and fresh must have the same length");
  }
  std::vector<deltawire::Stretch<Bits>> stretches;
  std::size_t reached = 0;
  for (std::size_t k = 0; k < std::min(live.size(), lasts.size()); ++k) {
    const auto last = static_cast<std::size_t>(lasts.data()[k]);
    if (last < reached || last > index.size()) break;
    stretches.push_back({live[k].data(), live[k].size(), last});
    reached = last;
  }
  if (stretches.size() != live.size() || live.size() != lasts.size() || reached != index.size()) {
    throw nb::value_error("each array's changes must end after those of the array before it");
  }
  deltawire::Exchanged found;
  std::size_t failed = 0;
  {
    const nb::gil_scoped_release unlocked;
    found = deltawire::exchange(stretches, index.data(), old.data(), fresh.data(), threads, failed);
  }
  if (found == deltawire::Exchanged::outside) throw nb::value_error("a place outside of live");
  return {static_cast<int>(found), failed};
}

// Writes table[code] × scale as bf16 into `out`; see `deltawire::dequantize4`.
void dequantize4(const Vector<std::uint8_t>& codes, const Vector<float>& values,
                 const Vector<float>& scales, const Writable<std::uint16_t>& out,
                 unsigned threads) {
  const std::size_t groups = scales.size();
  const std::size_t group = groups == 0 ? 0 : out.size() / groups;
  if (values.size() != 16 || group * groups != out.size() || group % 2 != 0 ||
      codes.size() * 2 != out.size()) {
    throw nb::value_error("codes, values, scales and out do not fit each other");
  }
  const nb::gil_scoped_release unlocked;
  deltawire::dequantize4(codes.data(), values.data(), scales.data(), groups, group, threads,
                         out.data());
}

// Writes table[code] × scale as bf16 into `out`; see `deltawire::dequantize8`.
void dequantize8(const Vector<std::uint8_t>& codes, const Vector<float>& values,
                 const Vector<float>& scales, std::size_t columns, std::size_t block_rows,
                 std::size_t block_columns, const Writable<std::uint16_t>& out,
                 unsigned threads) {
  const std::size_t rows = columns == 0 ? 0 : out.size() / columns;
  const auto blocks = [](std::size_t size, std::size_t block) {
    return block == 0 ? 0 : size / block + (size % block != 0);
  };
  if (values.size() != 256 || rows * columns != out.size() || codes.size() != out.size() ||
      scales.size() != blocks(rows, block_rows) * blocks(columns, block_columns) ||
      (out.size() != 0 && scales.size() == 0)) {
    throw nb::value_error("codes, values, scales and out do not fit each other");
  }
  const nb::gil_scoped_release unlocked;
  deltawire::dequantize8(codes.data(), values.data(), scales.data(), rows, columns, block_rows,
                         block_columns, threads, out.data());
}

std::string simd() {
  switch (deltawire::simd_path()) {
    case deltawire::Simd::avx512:
      return "avx512";
    case deltawire::Simd::avx2:
      return "avx2";
    default:
      return "portable";
  }
}

template <typename Bits>
void bind(nb::module_& module) {
  // noconvert, because a silent copy of a model is worse than a TypeError.
  module.def("digest", &digest<Bits>, "bits"_a.noconvert(), "key"_a, "start"_a);
  module.def("encode", &encode<Bits>, "base"_a.noconvert(), "target"_a.noconvert(), "columns"_a,
             "mantissa"_a, "exponent"_a, "key"_a.none(), "start"_a, "threads"_a);
  module.def("decode", &decode<Bits>, "body"_a, "lengths"_a, "base"_a.noconvert(), "columns"_a,
             "mantissa"_a, "exponent"_a, "first"_a, "last"_a, "key"_a.none(), "start"_a,
             "threads"_a);
  module.def("advance", &advance<Bits>, "body"_a, "lengths"_a, "base"_a.noconvert(), "columns"_a,
             "mantissa"_a, "exponent"_a, "threads"_a);
  module.def("encode_whole", &encode_whole<Bits>, "bits"_a.noconvert(), "low"_a, "width"_a,
             "threads"_a);
  module.def("decode_whole", &decode_whole<Bits>, "body"_a, "lengths"_a, "bits"_a.noconvert(),
             "low"_a, "width"_a, "threads"_a);
  module.def("exchange", &exchange<Bits>, "live"_a.noconvert(), "lasts"_a.noconvert(),
             "index"_a.noconvert(), "old"_a.noconvert(), "fresh"_a.noconvert(), "threads"_a);
  module.def("digest_at", &digest_at<Bits>, "positions"_a.noconvert(), "bits"_a.noconvert(),
             "key"_a);
}

nb::list encode_batch_of(const nb::list& parts, unsigned mantissa, unsigned exponent,
                         unsigned width) {
  switch (width) {
    case 1:
      return encode_batch<std::uint8_t>(parts, mantissa, exponent);
    case 2:
      return encode_batch<std::uint16_t>(parts, mantissa, exponent);
    case 4:
      return encode_batch<std::uint32_t>(parts, mantissa, exponent);
    case 8:
      return encode_batch<std::uint64_t>(parts, mantissa, exponent);
    default:
      throw nb::value_error("elements have 1, 2, 4 or 8 bytes");
  }
}

}  // namespace

NB_MODULE(_native, module) {
  module.attr("BLOCK") = deltawire::kBlock;
  module.attr("WHOLE_BLOCK") = deltawire::kWholeBlock;
  module.def("simd", &simd);
  module.def("digest_rounded", &digest_rounded, "values"_a.noconvert(), "key"_a, "start"_a);
  module.def("encode_batch", &encode_batch_of, "parts"_a, "mantissa"_a, "exponent"_a, "width"_a);
  module.def("dequantize4", &dequantize4, "codes"_a.noconvert(), "values"_a.noconvert(),
             "scales"_a.noconvert(), "out"_a.noconvert(), "threads"_a);
  module.def("dequantize8", &dequantize8, "codes"_a.noconvert(), "values"_a.noconvert(),
             "scales"_a.noconvert(), "columns"_a, "block_rows"_a, "block_columns"_a,
             "out"_a.noconvert(), "threads"_a);
  bind<std::uint8_t>(module);
  bind<std::uint16_t>(module);
  bind<std::uint32_t>(module);
  bind<std::uint64_t>(module);
}
