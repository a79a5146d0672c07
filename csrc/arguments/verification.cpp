#include "arguments/verification.h"

#include <algorithm>

namespace specdec {

void VerifyArguments::check_drafted(const Names& names) const {
  SPECDEC_CHECK(drafted.dim() == 2, names.drafted, " must be [B, ", names.size, "], got ",
                shape_of(drafted));
  check_ids(names.drafted, drafted);
  const std::string dims = std::string("[B, ") + names.size + "]";
  check_entries(names.drafted, "the outputs", dims.c_str(), {batch(), size()});
}

void VerifyArguments::check_target(const Names& names) const {
  const int64_t b = batch(), rows = size() + 1;
  if (target_indptr) {
    SPECDEC_CHECK(target.dim() == 2, "target must be [", names.rows,
                  ", V] when target_indptr is given, got ", shape_of(target));
    check_integers("target_indptr", *target_indptr, b + 1, target, "target");
  } else {
    SPECDEC_CHECK(target.dim() == 3 && target.size(0) == b && target.size(1) == rows,
                  "target must be [B, ", names.size, "+1, V] = [", b, ", ", rows, ", V], got ",
                  shape_of(target));
  }
  check_rows("target", target);
  if (token_bitmask) {
    check_bitmask("token_bitmask", *token_bitmask, "target", target);
    check_same_device("token_bitmask", *token_bitmask, target, "target");
  }
  check_same_device(names.drafted, drafted, target, "target");
}

void VerifyArguments::check_chosen_draft(const Names& names) const {
  const int64_t b = batch(), n = size();
  SPECDEC_CHECK(draft_rows->dim() == 2 && draft_rows->size(0) == b && draft_rows->size(1) == n,
                "draft_rows must be [B, ", names.size, "] = [", b, ", ", n, "], got ",
                shape_of(*draft_rows));
  check_ids("draft_rows", *draft_rows);
  check_same_device("draft_rows", *draft_rows, target, "target");
  const int64_t m =
      draft_arguments.rows && draft_arguments.rows->dim() >= 2 && draft_arguments.rows->dim() <= 3
          ? draft_arguments.rows->size(draft_arguments.rows->dim() - 2)
          : kAnySize;
  if (flat_draft()) return draft_arguments.check(target, b, {{"M", kAnySize}}, {{"M", m}});
  draft_arguments.check(target, b, {{"B", b}, {"M", kAnySize}}, {{"B", b}, {"M", m}});
}

void VerifyArguments::check_draws(const char* uniforms_shape, int64_t columns,
                                  bool rule_is_match) const {
  const int64_t b = batch();
  sampling.check(b, target, "target");
  check_integers("seeds", seeds, b, target, "target");
  check_integers("positions", positions, b, target, "target");
  if (!uniforms) return;
  check_matrix("uniforms", *uniforms, uniforms_shape, b, columns, ScalarType::Double, target,
               "target");
  SPECDEC_CHECK(!rule_is_match, "uniforms must be None when rule is match");
}

void VerifyArguments::check_limits() const {
  if (eos_token_ids) {
    SPECDEC_CHECK(eos_token_ids->dim() == 1, "eos_token_ids must be [E], got ",
                  shape_of(*eos_token_ids));
    check_integers("eos_token_ids", *eos_token_ids, eos_token_ids->size(0), target, "target");
  }
  if (max_new_tokens) {
    check_integers("max_new_tokens", *max_new_tokens, batch(), target, "target");
  }
}

int64_t VerifyArguments::widest_row() const {
  const int64_t vocab = target.size(target.dim() - 1);
  const std::optional<Tensor>& rows = draft_arguments.rows;
  return rows ? std::max(vocab, rows->size(rows->dim() - 1)) : vocab;
}

void VerifyArguments::fill(VerifyParams& p) {
  p.kind = checked_kind();
  p.batch = batch();
  p.vocab = target.size(target.dim() - 1);
  p.num_rows = target.size(0);
  p.target_indptr = integers(target_indptr);
  p.target = {target.const_data_ptr(), row_dtype(target), target_indptr ? 0 : target.stride(0),
              target.stride(target_indptr ? 0 : 1),
              bitmask_of(token_bitmask, target_indptr.has_value())};
  p.draft = draft_arguments.params(p.kind, flat_draft());
  p.draft_rows = integers(draft_rows);
  p.draft_token_ids = drafted.const_data_ptr();
  p.stride_token_sequence = drafted.stride(0);
  p.stride_token = drafted.stride(1);
  p.ids_are_int64 = drafted.scalar_type() == ScalarType::Long;
  seeds = dense_int64(seeds);
  positions = dense_int64(positions);
  p.seeds = seeds.const_data_ptr<int64_t>();
  p.positions = positions.const_data_ptr<int64_t>();
  p.uniforms = pointer<double>(uniforms);
  p.eos_token_ids = int64s(eos_token_ids);
  p.num_eos = eos_token_ids ? eos_token_ids->size(0) : 0;
  p.max_new_tokens = int64s(max_new_tokens);
  p.sampling = sampling.params();
}

void VerifyArguments::fill_outputs(VerifyParams& p, const Tensor& tokens,
                                   const Tensor& num_accepted, const Tensor& status,
                                   const Tensor& logprobs, const Tensor& accept_probs) const {
  p.tokens = tokens.mutable_data_ptr();
  p.num_accepted = num_accepted.mutable_data_ptr<int32_t>();
  p.status = status.mutable_data_ptr<int32_t>();
  if (with_logprobs) p.logprobs = logprobs.mutable_data_ptr<float>();
  if (with_accept_probs) p.accept_probs = accept_probs.mutable_data_ptr<float>();
}

}  // namespace specdec
