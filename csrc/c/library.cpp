// The functions of the C interface that concern the library and no op.
#include <new>
#include <string>

#include "c/call.h"
#include "cpu/row/tile.h"
#include "specdec/cuda_error.h"

namespace specdec::c {
namespace {

std::string& last_error() {
  thread_local std::string message;
  return message;
}

#ifdef SPECDEC_WITH_CUDA
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

std::string message_of(const CudaError& error) {
#ifdef SPECDEC_WITH_CUDA
  return cuda::describe_error(error.status);
#else
  return std::to_string(error.status);
#endif
}

}  // namespace

specdec_code failed() noexcept {
  try {
    try {
      throw;
    } catch (const ArgumentError& error) {
      last_error() = error.what();
      return SPECDEC_INVALID_ARGUMENT;
    } catch (const WithoutCuda&) {
      last_error() = "this library was built without CUDA kernels";
      return SPECDEC_WITHOUT_CUDA;
    } catch (const CudaError& error) {
      last_error() = "the CUDA kernel launch failed: " + message_of(error);
      return SPECDEC_CUDA_ERROR;
    } catch (const std::bad_alloc&) {
      last_error() = "there is not enough memory";
      return SPECDEC_OUT_OF_MEMORY;
    } catch (const std::exception& error) {
      last_error() = error.what();
      return SPECDEC_INTERNAL_ERROR;
    } catch (...) {
      last_error() = "an exception of an unknown type was thrown";
      return SPECDEC_INTERNAL_ERROR;
    }
  } catch (...) {  // there is no memory for the message either
    return SPECDEC_OUT_OF_MEMORY;
  }
}

void check_size(const void* args, size_t required, size_t size) {
  SPECDEC_CHECK(args != nullptr, "args must not be null");
  size_t given;  // the first field of every struct
  memcpy(&given, args, sizeof given);
  SPECDEC_CHECK(given >= required && given % alignof(int64_t) == 0,
                "args.struct_size must be at least ", required, " and a multiple of ",
                alignof(int64_t), ", as the init function sets it, got ", given);
  const auto* bytes = static_cast<const unsigned char*>(args);
  for (size_t i = size; i < given; ++i) {
    SPECDEC_CHECK(bytes[i] == 0, "args must be at most ", size,
                  " bytes for this version of the library, or the fields beyond must be 0, got ",
                  given, " and byte ", i, " is set");
  }
}

}  // namespace specdec::c

using namespace specdec;

extern "C" {

const char* specdec_last_error(void) { return c::last_error().c_str(); }
int32_t specdec_version(void) { return SPECDEC_VERSION; }
int32_t specdec_has_cuda(void) { return c::kHasCuda; }
const char* specdec_cpu_capability(void) { return cpu::tile_kernels().isa; }
int32_t specdec_get_num_threads(void) { return cpu::num_threads(); }
specdec_code specdec_set_num_threads(int32_t threads) {
  return c::guarded([&] {
    SPECDEC_CHECK(1 <= threads && threads <= 1024, "threads must be in [1, 1024], got ", threads);
    cpu::set_num_threads(threads);
  });
}

}  // extern "C"
