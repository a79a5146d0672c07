#include "arguments/kept_tokens.h"

namespace specdec {

void KeptTokensArguments::check() const {
  checked_kind();
  SPECDEC_CHECK(1 <= max_kept && max_kept <= kMostKept, "max_kept must be in [1, ", kMostKept,
                "], got ", max_kept);
  if (target_indptr) {
    SPECDEC_CHECK(target.dim() == 2, "target must be [R, V] when target_indptr is given, got ",
                  shape_of(target));
    SPECDEC_CHECK(target_indptr->dim() == 1 && target_indptr->size(0) >= 1,
                  "target_indptr must be [B+1], got ", shape_of(*target_indptr));
    check_integers("target_indptr", *target_indptr, target_indptr->size(0), target, "target");
    SPECDEC_CHECK(rows.has_value(), "rows must be given with target_indptr");
  } else {
    SPECDEC_CHECK(target.dim() == 2 || target.dim() == 3,
                  "target must be [R, V] or [B, N, V], got ", shape_of(target));
    SPECDEC_CHECK(!rows || target.dim() == 3,
                  "target must be [B, N, V] when rows are given without target_indptr, got ",
                  shape_of(target));
  }
  check_rows("target", target);
  if (rows) {
    SPECDEC_CHECK(rows->dim() == 2 && rows->size(0) == batch(), "rows must be [B, E] = [", batch(),
                  ", E], got ", shape_of(*rows));
    check_ids("rows", *rows);
    check_same_device("rows", *rows, target, "target");
  }
  check_entries(rows ? "rows" : "target", "the outputs", "[B, E, max_kept]",
                {batch(), rows_each(), max_kept});
  sampling.check(batch(), target, "target");
  if (token_bitmask) {
    check_bitmask("token_bitmask", *token_bitmask, "target", target);
    check_same_device("token_bitmask", *token_bitmask, target, "target");
  }
}

KeptTokensParams KeptTokensArguments::params(const KeptTokensOutputs& out) {
  const auto& [ids, logprobs, counts, status] = out;
  const bool flat = target_indptr.has_value();
  KeptTokensParams p{};
  p.target = {target.const_data_ptr(), row_dtype(target), flat ? 0 : target.stride(0),
              plain() ? 0 : target.stride(flat ? 0 : 1), bitmask_of(token_bitmask, flat)};
  p.sampling = sampling.params();
  p.target_indptr = integers(target_indptr);
  if (rows) p.rows = ids_of(*rows);
  p.ids = ids.mutable_data_ptr<int64_t>();
  p.logprobs = logprobs.mutable_data_ptr<float>();
  p.counts = counts.mutable_data_ptr<int32_t>();
  p.status = status.mutable_data_ptr<int32_t>();
  p.batch = batch();
  p.rows_each = rows_each();
  p.num_rows = flat ? target.size(0) : plain() ? 1 : target.size(1);
  p.vocab = target.size(target.dim() - 1);
  p.max_kept = max_kept;
  p.kind = checked_kind();
  return p;
}

}  // namespace specdec
