#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "delta.hpp"
#include "digest.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename Scalar>
using Vector = nb::ndarray<const Scalar, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using LanePair = std::pair<std::uint64_t, std::uint64_t>;

template <typename Bits>
LanePair digest(const Vector<Bits>& bits, std::uint64_t key, std::uint64_t start) {
  const nb::gil_scoped_release unlocked;
  const deltawire::Lanes sum = deltawire::digest(bits.data(), bits.size(), key, start);
  return {sum.lane0, sum.lane1};
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

template <typename Bits>
std::pair<nb::bytes, std::uint64_t> encode_block(const Vector<Bits>& base,
                                                 const Vector<Bits>& target, unsigned mantissa,
                                                 unsigned exponent) {
  if (base.size() != target.size() || base.size() > deltawire::kBlock || exponent > 11) {
    throw nb::value_error("base and target must be one block of the same length");
  }
  std::vector<std::uint8_t> payload;
  std::uint64_t changed = 0;
  {
    const nb::gil_scoped_release unlocked;
    payload = deltawire::encode_block(base.data(), target.data(), base.size(),
                                      {mantissa, exponent}, changed, deltawire::simd_path());
  }
  return {nb::bytes(payload.data(), payload.size()), changed};
}

template <typename Scalar>
nb::ndarray<nb::numpy, Scalar, nb::ndim<1>> owned(std::unique_ptr<Scalar[]> data,
                                                  std::size_t size) {
  Scalar* raw = data.release();
  nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<Scalar*>(p); });
  return nb::ndarray<nb::numpy, Scalar, nb::ndim<1>>(raw, {size}, owner);
}

template <typename Bits>
nb::tuple decode_block(const Vector<std::uint8_t>& payload, const Vector<Bits>& base,
                       unsigned mantissa, unsigned exponent, std::int64_t start,
                       std::size_t room) {
  if (base.size() > deltawire::kBlock || exponent > 11) {
    throw nb::value_error("not a block");
  }
  room = std::min(room, base.size());
  auto positions = std::make_unique_for_overwrite<std::int64_t[]>(room);
  auto bits = std::make_unique_for_overwrite<Bits[]>(room);
  std::int64_t found = 0;
  {
    const nb::gil_scoped_release unlocked;
    found = deltawire::decode_block(payload.data(), payload.size(), base.data(), base.size(),
                                    {mantissa, exponent}, start, positions.get(), bits.get(), room,
                                    deltawire::simd_path());
  }
  if (found < 0) throw nb::value_error("the payload is not a delta for this base");
  const auto size = static_cast<std::size_t>(found);
  return nb::make_tuple(owned(std::move(positions), size), owned(std::move(bits), size));
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
  module.def("encode_block", &encode_block<Bits>, "base"_a.noconvert(), "target"_a.noconvert(),
             "mantissa"_a, "exponent"_a);
  module.def("decode_block", &decode_block<Bits>, "payload"_a.noconvert(), "base"_a.noconvert(),
             "mantissa"_a, "exponent"_a, "start"_a, "room"_a);
  module.def("digest_at", &digest_at<Bits>, "positions"_a.noconvert(), "bits"_a.noconvert(),
             "key"_a);
}

}  // namespace

NB_MODULE(_native, module) {
  module.attr("BLOCK") = deltawire::kBlock;
  module.def("simd", &simd);
  bind<std::uint8_t>(module);
  bind<std::uint16_t>(module);
  bind<std::uint32_t>(module);
  bind<std::uint64_t>(module);
}
