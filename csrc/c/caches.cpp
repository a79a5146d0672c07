// The ops that append to caches, truncate and compact them.
#include "arguments/caches.h"

#include "c/call.h"

namespace specdec::c {
namespace {

Tensor required(const char* name, const specdec_tensor& field, const Device& device) {
  Tensor t;
  set(argument(name, t), field, device);
  return t;
}

std::vector<Tensor> list(const char* name, const specdec_tensor* tensors, int64_t count,
                         const Device& device) {
  SPECDEC_CHECK(count >= 0, "num_", name, " must be at least 0, got ", count);
  SPECDEC_CHECK(tensors != nullptr || count == 0, name, " must not be null");
  std::vector<Tensor> out;
  out.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const std::string full = std::string(name) + "[" + std::to_string(i) + "]";
    SPECDEC_CHECK(tensors[i].dtype != SPECDEC_NONE, full, " must be given, got none");
    out.push_back(tensor_of(full, tensors[i], device));
    for (int64_t d = 0; d < out.back().dim(); ++d) {
      SPECDEC_CHECK(out.back().stride(d) >= 0, full, ".strides[", d, "] must be at least 0, got ",
                    out.back().stride(d));
    }
  }
  return out;
}

struct KvAppend {
  using Args = specdec_kv_append_args;
  using Arguments = void;
  static constexpr size_t kRequired = sizeof(Args);
  static void call(const Args& a, const Device& on) {
    const auto caches = list("caches", a.caches, a.num_caches, on);
    const auto entries = list("entries", a.entries, a.num_entries, on);
    kv_append_(caches, entries, required("positions", a.positions, on));
  }
};

struct KvTruncate {
  using Args = specdec_kv_truncate_args;
  using Arguments = void;
  static constexpr size_t kRequired = offsetof(Args, zero_fill);
  static void call(const Args& a, const Device& on) {
    const auto caches = list("caches", a.caches, a.num_caches, on);
    const Tensor lengths = required("lengths", a.lengths, on);
    kv_truncate_(caches, lengths, required("new_lengths", a.new_lengths, on), a.zero_fill != 0);
  }
};

struct KvCompact {
  using Args = specdec_kv_compact_args;
  using Arguments = void;
  static constexpr size_t kRequired = sizeof(Args);
  static void call(const Args& a, const Device& on) {
    const auto caches = list("caches", a.caches, a.num_caches, on);
    const Tensor base = required("base", a.base, on);
    kv_compact_(caches, base, required("path", a.path, on));
  }
};

struct PagedAppend {
  using Args = specdec_paged_append_args;
  using Arguments = void;
  static constexpr size_t kRequired = offsetof(Args, counts);
  static void call(const Args& a, const Device& on) {
    const auto caches = list("caches", a.caches, a.num_caches, on);
    const auto entries = list("entries", a.entries, a.num_entries, on);
    const Tensor tables = required("block_tables", a.block_tables, on),
                 positions = required("positions", a.positions, on);
    std::optional<Tensor> counts;
    set(argument("counts", counts), a.counts, on);
    paged_append_(caches, entries, tables, positions, counts);
  }
};

struct PagedTruncate {
  using Args = specdec_paged_truncate_args;
  using Arguments = void;
  static constexpr size_t kRequired = sizeof(Args);
  static void call(const Args& a, const Device& on) {
    const Tensor tables = required("block_tables", a.block_tables, on),
                 lengths = required("lengths", a.lengths, on),
                 new_lengths = required("new_lengths", a.new_lengths, on);
    check_paged_truncate(tables, lengths, new_lengths, a.block_size);
    output("blocks", a.blocks, tables.numel());
    output("num_freed", a.num_freed, lengths.numel());
    truncate_tables_(tables, lengths, new_lengths, a.block_size, {a.blocks, a.num_freed});
  }
};

struct PagedCompact {
  using Args = specdec_paged_compact_args;
  using Arguments = void;
  static constexpr size_t kRequired = sizeof(Args);
  static void call(const Args& a, const Device& on) {
    const auto caches = list("caches", a.caches, a.num_caches, on);
    const Tensor tables = required("block_tables", a.block_tables, on),
                 base = required("base", a.base, on);
    paged_compact_(caches, tables, base, required("path", a.path, on));
  }
};

}  // namespace
}  // namespace specdec::c

SPECDEC_DEFINE_PLAIN(kv_append, specdec::c::KvAppend)
SPECDEC_DEFINE_PLAIN(kv_truncate, specdec::c::KvTruncate)
SPECDEC_DEFINE_PLAIN(kv_compact, specdec::c::KvCompact)
SPECDEC_DEFINE_PLAIN(paged_append, specdec::c::PagedAppend)
SPECDEC_DEFINE_PLAIN(paged_truncate, specdec::c::PagedTruncate)
SPECDEC_DEFINE_PLAIN(paged_compact, specdec::c::PagedCompact)
