#include "arguments/penalties.h"

#include "arguments/launch.h"
#include "arguments/memory.h"
#include "specdec/apply_penalties.h"

namespace specdec {

void Penalty::check(const char* name, int64_t batch, const Tensor& target, bool positive) const {
  if (each) return check_vector(name, *each, batch, ScalarType::Float, target, "target");
  const auto x = static_cast<float>(all);
  SPECDEC_CHECK(std::isfinite(x) && (x > 0 || !positive), name,
                positive ? " must be finite and above 0, got " : " must be finite, got ", x);
}

void PenaltyArguments::check() const {
  SPECDEC_CHECK(drafted.dim() == 2, "draft_token_ids must be [B, N], got ", shape_of(drafted));
  check_ids("draft_token_ids", drafted);
  const int64_t b = batch(), n = drafted.size(1);
  if (target_indptr) {
    SPECDEC_CHECK(target.dim() == 2, "target must be [R, V] when target_indptr is given, got ",
                  shape_of(target));
    check_integers("target_indptr", *target_indptr, b + 1, target, "target");
  } else {
    SPECDEC_CHECK(target.dim() == 3 && target.size(0) == b && target.size(1) == n + 1,
                  "target must be [B, N+1, V] = [", b, ", ", n + 1, ", V], got ", shape_of(target));
  }
  check_rows("target", target);
  check_not_expanded("target", target);
  check_same_device("draft_token_ids", drafted, target, "target");
  if (parents) {
    SPECDEC_CHECK(parents->dim() == 2 && parents->size(0) == b && parents->size(1) == n,
                  "parents must be [B, N] = [", b, ", ", n, "], got ", shape_of(*parents));
    check_ids("parents", *parents);
    check_same_device("parents", *parents, target, "target");
  }
  check_words("token_counts", "[B, V]", token_counts, vocab());
  check_words("prompt_mask", "[B, ceil(V/32)]", prompt_mask, bitmask_words(vocab()));
  repetition.check("repetition_penalty", b, target, true);
  presence.check("presence_penalty", b, target, false);
  frequency.check("frequency_penalty", b, target, false);
  check_biases();
  SPECDEC_CHECK(min_new_tokens.has_value() == eos_token_ids.has_value(),
                "min_new_tokens and eos_token_ids must come together");
  if (!min_new_tokens) return;
  check_integers("min_new_tokens", *min_new_tokens, b, target, "target");
  SPECDEC_CHECK(eos_token_ids->dim() == 1, "eos_token_ids must be [E], got ",
                shape_of(*eos_token_ids));
  check_integers("eos_token_ids", *eos_token_ids, eos_token_ids->size(0), target, "target");
}

void PenaltyArguments::run() {
  check();
  const auto flat = target_indptr.has_value();
  PenaltyParams p{};
  drafted = read_first(drafted, target);
  p.rows = target.mutable_data_ptr();
  p.dtype = row_dtype(target);
  p.stride_sequence = flat ? 0 : target.stride(0);
  p.stride_row = target.stride(flat ? 0 : 1);
  p.num_rows = target.size(0);
  p.target_indptr = integers(target_indptr);
  p.drafted = ids_of(drafted);
  if (parents) p.parents = ids_of(*parents);
  if (token_counts) {
    p.counts = token_counts->const_data_ptr<int32_t>();
    p.stride_counts = token_counts->stride(0);
  }
  if (prompt_mask) {
    p.prompt = {static_cast<const uint32_t*>(prompt_mask->const_data_ptr()), prompt_mask->stride(0),
                0};
  }
  p.repetitions = pointer<float>(repetition.each);
  p.presences = pointer<float>(presence.each);
  p.frequencies = pointer<float>(frequency.each);
  p.repetition = static_cast<float>(repetition.all);
  p.presence = static_cast<float>(presence.all);
  p.frequency = static_cast<float>(frequency.all);
  p.bias_ids = integers(bias_ids);
  p.biases = pointer<float>(biases);
  p.num_biases = bias_ids ? bias_ids->size(1) : 0;
  p.min_new_tokens = int64s(min_new_tokens);
  p.eos_token_ids = int64s(eos_token_ids);
  p.num_eos = eos_token_ids ? eos_token_ids->size(0) : 0;
  p.batch = batch();
  p.drafts = drafted.size(1);
  p.vocab = vocab();
  launch(target, p, SPECDEC_PLAIN_LAUNCHERS(PenaltyParams, apply_penalties));
}

void PenaltyArguments::check_words(const char* name, const char* shape,
                                   const std::optional<Tensor>& t, int64_t columns) const {
  if (!t) return;
  check_matrix(name, *t, shape, batch(), columns, ScalarType::Int, target, "target");
  SPECDEC_CHECK(t->stride(1) == 1 || columns == 1, name,
                " must have a contiguous last dimension, got stride ", t->stride(1));
}

void PenaltyArguments::check_biases() const {
  SPECDEC_CHECK(bias_ids.has_value() == biases.has_value(),
                "bias_ids and biases must come together");
  if (!bias_ids) return;
  SPECDEC_CHECK(bias_ids->dim() == 2 && bias_ids->size(0) == batch(), "bias_ids must be [B, K] = [",
                batch(), ", K], got ", shape_of(*bias_ids));
  specdec::check_ids("bias_ids", *bias_ids);
  check_same_device("bias_ids", *bias_ids, target, "target");
  check_matrix("biases", *biases, "[B, K]", batch(), bias_ids->size(1), ScalarType::Float, target,
               "target");
}

}  // namespace specdec
