#pragma once
// How a call of the C interface becomes one of csrc/arguments and of the kernels.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "arguments/checks.h"
#include "arguments/op.h"
#include "c/launch.h"
#include "specdec/specdec.h"

namespace specdec::c {

// The code of what is thrown now; its message becomes that of specdec_last_error.
specdec_code failed() noexcept;

// Calls f. Nothing that it throws reaches the caller.
template <class F>
specdec_code guarded(F&& f) noexcept {
  try {
    f();
    return SPECDEC_OK;
  } catch (...) {
    return failed();
  }
}

// Fields of a struct of the interface as the arguments that they are.

inline void set(const Argument<Tensor>& a, const specdec_tensor& field, const Device& device) {
  SPECDEC_CHECK(field.dtype != SPECDEC_NONE, a.name, " must be given, got none");
  a.value = tensor_of(a.name, field, device);
}
inline void set(const Argument<std::optional<Tensor>>& a, const specdec_tensor& field,
                const Device& device) {
  if (field.dtype != SPECDEC_NONE) a.value = tensor_of(a.name, field, device);
}
// Whether an output is wanted.
inline void set(const Argument<bool>& a, const float* field, const Device&) {
  a.value = field != nullptr;
}
template <class T>
void set(const Argument<T>& a, const T& field, const Device&) {
  a.value = field;
}
inline void set(const Argument<float>& a, const double& field, const Device&) {
  a.value = static_cast<float>(field);
}

template <class T, class Field>
void set_default(const Argument<T>& a, Field& field) {
  if constexpr (std::is_same_v<Field, int64_t>) field = a.value;
  if constexpr (std::is_same_v<Field, double>) field = a.value;
}

// Calls f(argument, field) for each.
template <class Arguments, class Fields, class F, size_t... i>
void for_each(Arguments arguments, Fields fields, F&& f, std::index_sequence<i...>) {
  (f(std::get<i>(arguments), std::get<i>(fields)), ...);
}
template <class Arguments, class Fields, class F>
void for_each(Arguments arguments, Fields fields, F&& f) {
  constexpr size_t n = std::tuple_size_v<Arguments>;
  static_assert(n == std::tuple_size_v<Fields>, "the fields are the arguments, in their order");
  for_each(arguments, fields, f, std::make_index_sequence<n>{});
}

// `Call` describes an op: its struct `Args`, the size `kRequired` up to which every version has the
// struct, and for an op of csrc/arguments its `Arguments` and the `fields` in their order.
template <class Call>
typename Call::Args defaults() {
  typename Call::Args args{};
  if constexpr (!std::is_void_v<typename Call::Arguments>) {
    typename Call::Arguments arguments{};
    Call::set_defaults(arguments);
    for_each(arguments.arguments(), Call::fields(args),
             [](const auto& argument, auto& field) { set_default(argument, field); });
  }
  args.struct_size = sizeof args;
  return args;
}

template <class Call, class Arguments>
void fill(Arguments& arguments, typename Call::Args& args, const Device& device) {
  for_each(arguments.arguments(), Call::fields(args),
           [&](const auto& argument, auto& field) { set(argument, field, device); });
}

// A caller may know fewer fields than this library, or more, which it has not set then.
void check_size(const void* args, size_t required, size_t size);

template <class Call>
typename Call::Args known(const typename Call::Args* given) {
  check_size(given, Call::kRequired, sizeof *given);
  auto args = defaults<Call>();
  memcpy(&args, given, std::min(given->struct_size, sizeof args));
  return args;
}

template <class Call>
specdec_code init(typename Call::Args* args, size_t size) noexcept {
  return guarded([&] {
    SPECDEC_CHECK(args != nullptr, "args must not be null");
    SPECDEC_CHECK(size >= Call::kRequired && size % alignof(int64_t) == 0,
                  "struct_size must be at least ", Call::kRequired, " and a multiple of ",
                  alignof(int64_t), ", got ", size);
    auto made = defaults<Call>();
    made.struct_size = size;
    memset(static_cast<void*>(args), 0, size);
    memcpy(static_cast<void*>(args), &made, std::min(size, sizeof made));
  });
}

// The parameters of the kernels, and the owners of the memory that they point into.
template <class Call>
struct Prepared {
  typename Call::Arguments arguments{};
  typename Call::Params params{};

  Prepared(const typename Call::Args* given, const Device& device) {
    auto args = known<Call>(given);
    fill<Call>(arguments, args, device);
    arguments.check();
    params = arguments.params(Call::outputs(args, arguments));
  }
};

// Memory that the caller must give, unless nothing is written to it.
template <class T>
Tensor output(const char* name, T* data, int64_t entries) {
  SPECDEC_CHECK(data != nullptr || entries == 0, name, " must not be null");
  return {name,
          {},
          {nullptr, const_cast<void*>(static_cast<const void*>(data)), ScalarType::Other, {}, {}}};
}

// An op whose CUDA kernels need no workspace: `call` runs it where its tensors are.
template <class Call>
specdec_code run_plain(const typename Call::Args* args, const Device& device) noexcept {
  return guarded([&] {
    auto all = known<Call>(args);
    Call::call(all, device);
  });
}

template <class Call>
specdec_code run(const typename Call::Args* args) noexcept {
  return guarded([&] { Call::kKernels.cpu(Prepared<Call>(args, {}).params, cpu::counted()); });
}

template <class Call>
specdec_code workspace_bytes(const typename Call::Args* args, int64_t* bytes) noexcept {
  return guarded([&] {
    SPECDEC_CHECK(bytes != nullptr, "bytes must not be null");
    const Prepared<Call> prepared(args, {true, nullptr});
    if (Call::kKernels.workspace_bytes == nullptr) throw WithoutCuda{};
    *bytes = Call::kKernels.workspace_bytes(prepared.params);
  });
}

template <class Call>
specdec_code start(const typename Call::Args* args, void* workspace, int64_t bytes,
                   void* stream) noexcept {
  return guarded([&] {
    const Prepared<Call> prepared(args, {true, stream});
    if (Call::kKernels.cuda == nullptr) throw WithoutCuda{};
    const int64_t needed = Call::kKernels.workspace_bytes(prepared.params);
    SPECDEC_CHECK(bytes >= needed, "workspace_bytes must be at least ", needed, ", got ", bytes);
    SPECDEC_CHECK(workspace != nullptr, "workspace must not be null");
    check_started(Call::kKernels.cuda(prepared.params, workspace, stream));
  });
}

}  // namespace specdec::c

// The functions of an op; `Call` describes it.
#define SPECDEC_DEFINE_INIT(op, Call)                                                          \
  extern "C" specdec_code specdec_##op##_init(specdec_##op##_args* args, size_t struct_size) { \
    return specdec::c::init<Call>(args, struct_size);                                          \
  }
#define SPECDEC_DEFINE(op, Call)                                                                \
  SPECDEC_DEFINE_INIT(op, Call)                                                                 \
  extern "C" specdec_code specdec_##op(const specdec_##op##_args* args) {                       \
    return specdec::c::run<Call>(args);                                                         \
  }                                                                                             \
  extern "C" specdec_code specdec_##op##_cuda_workspace_bytes(const specdec_##op##_args* args,  \
                                                              int64_t* bytes) {                 \
    return specdec::c::workspace_bytes<Call>(args, bytes);                                      \
  }                                                                                             \
  extern "C" specdec_code specdec_##op##_cuda(const specdec_##op##_args* args, void* workspace, \
                                              int64_t workspace_bytes, void* stream) {          \
    return specdec::c::start<Call>(args, workspace, workspace_bytes, stream);                   \
  }
// Those of an op whose CUDA kernels need no workspace.
#define SPECDEC_DEFINE_PLAIN(op, Call)                                                         \
  SPECDEC_DEFINE_INIT(op, Call)                                                                \
  extern "C" specdec_code specdec_##op(const specdec_##op##_args* args) {                      \
    return specdec::c::run_plain<Call>(args, {});                                              \
  }                                                                                            \
  extern "C" specdec_code specdec_##op##_cuda(const specdec_##op##_args* args, void* stream) { \
    return specdec::c::run_plain<Call>(args, {true, stream});                                  \
  }
