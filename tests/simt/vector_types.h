#pragma once
// CUDA's vector types with CUDA's alignment, so that the undefined-behaviour sanitizer reports
// accesses that fault on a device. They are copied word by word, so that such an access does not
// crash here.

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(8) uint2 {
  unsigned x = 0, y = 0;
  uint2() = default;
  uint2(const uint2& o) : x(o.x), y(o.y) {}
  uint2& operator=(const uint2& o) {
    x = o.x, y = o.y;
    return *this;
  }
};

struct alignas(16) uint4 {
  unsigned x = 0, y = 0, z = 0, w = 0;
  uint4() = default;
  uint4(const uint4& o) : x(o.x), y(o.y), z(o.z), w(o.w) {}
  uint4& operator=(const uint4& o) {
    x = o.x, y = o.y, z = o.z, w = o.w;
    return *this;
  }
};
