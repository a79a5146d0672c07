#pragma once
// CUDA's vector types with CUDA's alignment, so that the undefined-behaviour sanitizer reports
// accesses that fault on a device. They are copied word by word, so that such an access does not
// crash here.

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define SIMT_VECTOR2(name, T, bytes)        \
  struct alignas(bytes) name {              \
    T x = 0, y = 0;                         \
    name() = default;                       \
    name(T x, T y) : x(x), y(y) {}          \
    name(const name& o) : x(o.x), y(o.y) {} \
    name& operator=(const name& o) {        \
      x = o.x, y = o.y;                     \
      return *this;                         \
    }                                       \
  };                                        \
  inline name make_##name(T x, T y) { return name(x, y); }

#define SIMT_VECTOR4(name, T, bytes)                        \
  struct alignas(bytes) name {                              \
    T x = 0, y = 0, z = 0, w = 0;                           \
    name() = default;                                       \
    name(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}    \
    name(const name& o) : x(o.x), y(o.y), z(o.z), w(o.w) {} \
    name& operator=(const name& o) {                        \
      x = o.x, y = o.y, z = o.z, w = o.w;                   \
      return *this;                                         \
    }                                                       \
  };                                                        \
  inline name make_##name(T x, T y, T z, T w) { return name(x, y, z, w); }

SIMT_VECTOR2(int2, int, 8)
SIMT_VECTOR2(uint2, unsigned, 8)
SIMT_VECTOR2(float2, float, 8)
SIMT_VECTOR2(double2, double, 16)
SIMT_VECTOR2(longlong2, long long, 16)
SIMT_VECTOR2(ulonglong2, unsigned long long, 16)
SIMT_VECTOR4(int4, int, 16)
SIMT_VECTOR4(uint4, unsigned, 16)
SIMT_VECTOR4(float4, float, 16)
SIMT_VECTOR4(ushort4, unsigned short, 8)

#undef SIMT_VECTOR2
#undef SIMT_VECTOR4
