#include "torch/arguments/decoder_layer.h"

#include "torch/register.h"

namespace specdec {
namespace {

std::vector<Tensor> all_dense(std::vector<Tensor> tensors) {
  for (Tensor& t : tensors) t = dense(t);
  return tensors;
}

const Tensor* item_of(const std::vector<Tensor>& tensors, size_t i) {
  return tensors.empty() ? nullptr : &tensors[i];
}

// Checks what the op `norm_qkv_rope` takes.
void check_inputs(const Tensor& x, const Tensor& norm, const std::vector<Tensor>& qkv,
                  const std::vector<int64_t>& in_features, const std::vector<int64_t>& out_features,
                  const Tensor& cos, const Tensor& sin, const std::vector<Tensor>& biases,
                  const std::vector<Tensor>& head_norms, double epsilon) {
  check_hidden("x", x);
  check_norm_qkv_rope(x, x.size(2), norm, qkv, in_features, out_features, cos, sin, biases,
                      head_norms, epsilon);
}

std::tuple<Tensor, Tensor, Tensor> norm_qkv_rope(Tensor x, Tensor norm, std::vector<Tensor> qkv,
                                                 std::vector<int64_t> in_features,
                                                 std::vector<int64_t> out_features, Tensor cos,
                                                 Tensor sin, std::vector<Tensor> biases,
                                                 std::vector<Tensor> head_norms, double epsilon) {
  check_inputs(x, norm, qkv, in_features, out_features, cos, sin, biases, head_norms, epsilon);
  x = dense(x);
  norm = dense(norm);
  cos = dense(cos);
  sin = dense(sin);
  biases = all_dense(biases);
  head_norms = all_dense(head_norms);
  const int64_t size = cos.size(2);
  NormQkvRopeParams p = {};
  p.x = x.const_data_ptr();
  p.norm = norm.const_data_ptr();
  p.cos = cos.const_data_ptr();
  p.sin = sin.const_data_ptr();
  p.dtype = row_dtype(norm);
  p.rows = x.size(0) * x.size(1);
  p.hidden = norm.numel();
  p.parts = norm.dim() == 1 ? 1 : norm.size(0);
  p.head_size = size;
  p.row_period = cos.size(0) * cos.size(1);
  p.epsilon = static_cast<float>(epsilon);
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < 3; ++i) {
    outputs.push_back(
        torch::stable::new_empty(x, {x.size(0), x.size(1), out_features[i] / size, size}));
    p.qkv[i] = weight_of(qkv[i], item_of(biases, i), out_features[i]);
    p.outputs[i] = outputs[i].mutable_data_ptr();
  }
  for (size_t i = 0; i < head_norms.size(); ++i) p.head_norms[i] = head_norms[i].const_data_ptr();
  cpu::norm_qkv_rope(p, torch_parallel());
  return {outputs[0], outputs[1], outputs[2]};
}

void check_output_norm_mlp(const Tensor& attended, const Tensor& residual, const Tensor& norm,
                           const Tensor& output, const std::vector<Tensor>& mlp,
                           const std::vector<int64_t>& in_features,
                           const std::vector<int64_t>& out_features,
                           const std::optional<Tensor>& output_bias,
                           const std::vector<Tensor>& biases, double epsilon) {
  check_hidden("residual", residual);
  const int64_t batch = residual.size(0), tokens = residual.size(1);
  SPECDEC_CHECK(attended.dim() == 3 && attended.size(0) == batch && attended.size(1) == tokens &&
                    attended.size(2) >= 1,
                "attended must be [B, n, A] = [", batch, ", ", tokens, ", A], got ",
                shape_of(attended));
  check_like("attended", attended, residual, "residual");
  check_mlp(residual, residual.size(2), attended.size(2), norm, output, mlp, in_features,
            out_features, output_bias, biases, epsilon);
}

Tensor output_norm_mlp(Tensor attended, Tensor residual, Tensor norm, Tensor output,
                       std::vector<Tensor> mlp, std::vector<int64_t> in_features,
                       std::vector<int64_t> out_features, std::optional<Tensor> output_bias,
                       std::vector<Tensor> biases, double epsilon) {
  check_output_norm_mlp(attended, residual, norm, output, mlp, in_features, out_features,
                        output_bias, biases, epsilon);
  const int64_t hidden = norm.size(0);
  Tensor y = torch::stable::new_empty(residual, {residual.size(0), residual.size(1), hidden});
  attended = dense(attended);
  residual = dense(residual);
  norm = dense(norm);
  if (output_bias) output_bias = dense(*output_bias);
  biases = all_dense(biases);
  OutputNormMlpParams p = {};
  p.attended = attended.const_data_ptr();
  p.residual = residual.const_data_ptr();
  p.norm = norm.const_data_ptr();
  p.output = weight_of(output, output_bias ? &*output_bias : nullptr, hidden);
  p.gate = weight_of(mlp[0], item_of(biases, 0), out_features[1]);
  p.up = weight_of(mlp[1], item_of(biases, 1), out_features[2]);
  p.down = weight_of(mlp[2], item_of(biases, 2), hidden);
  p.y = y.mutable_data_ptr();
  p.dtype = row_dtype(norm);
  p.rows = residual.size(0) * residual.size(1);
  p.attended_size = attended.size(2);
  p.hidden = hidden;
  p.epsilon = static_cast<float>(epsilon);
  cpu::output_norm_mlp(p, torch_parallel());
  return y;
}

Tensor decoder_layers_(Tensor x, std::vector<Tensor> norms, std::vector<Tensor> weights,
                       std::vector<int64_t> in_features, std::vector<int64_t> out_features,
                       std::vector<Tensor> qkv_biases, std::vector<Tensor> output_biases,
                       std::vector<Tensor> mlp_biases, std::vector<Tensor> head_norms, Tensor cos,
                       Tensor sin, std::vector<Tensor> caches, Tensor positions, Tensor mask,
                       double scale, double epsilon, bool every_layer) {
  const Extents written = check_decoder_layers(
      x, norms, weights, in_features, out_features, qkv_biases, output_biases, mlp_biases,
      head_norms, cos, sin, caches, positions, mask, scale, epsilon, every_layer);
  const std::vector<Tensor> read_later = read_first({x, cos, sin, positions, mask}, written);
  const DecoderLayers layers(written, norms, weights, out_features, qkv_biases, output_biases,
                             mlp_biases, head_norms, caches);
  const int64_t hidden = norms[1].size(0);
  x = dense(read_later[0]);
  cos = dense(read_later[1]);
  sin = dense(read_later[2]);
  positions = read_later[3];
  mask = read_later[4].stride(3) == 1 ? read_later[4] : contiguous(read_later[4]);
  const Tensor residual = dense(torch::stable::narrow(x, 2, x.size(2) - hidden, hidden));
  std::vector<int64_t> shape = {x.size(0), x.size(1), hidden};
  if (every_layer) shape.insert(shape.begin(), static_cast<int64_t>(norms.size()) / 2);
  Tensor y = torch::stable::new_empty(x, shape);

  DecoderLayersParams p = {};
  layers.set(p);
  p.x = x.const_data_ptr();
  p.residual = residual.const_data_ptr();
  p.cos = cos.const_data_ptr();
  p.sin = sin.const_data_ptr();
  p.positions = kv_vector<const void>(positions);
  p.mask = static_cast<const uint8_t*>(mask.const_data_ptr());
  p.mask_stride_sequence = mask.stride(0);
  p.mask_stride_token = mask.stride(2);
  p.y = y.mutable_data_ptr();
  p.dtype = row_dtype(x);
  p.batch = x.size(0);
  p.tokens = x.size(1);
  p.input = x.size(2);
  p.hidden = hidden;
  p.head_size = cos.size(2);
  p.row_period = cos.size(0) * cos.size(1);
  p.slots = mask.size(3);
  p.scale = static_cast<float>(scale);
  p.epsilon = static_cast<float>(epsilon);
  p.every_layer = every_layer;
  cpu::decoder_layers(p, torch_parallel());
  return y;
}

// The features of output_norm_mlp are those of `output`, then of `mlp`.
#define SPECDEC_NORM_QKV_ROPE_ARGUMENTS                                                \
  "Tensor x, Tensor norm, Tensor[] qkv, SymInt[] in_features, SymInt[] out_features, " \
  "Tensor cos, Tensor sin, Tensor[] biases, Tensor[] head_norms, float epsilon"
#define SPECDEC_OUTPUT_NORM_MLP_ARGUMENTS                                               \
  "Tensor attended, Tensor residual, Tensor norm, Tensor output, Tensor[] mlp, "        \
  "SymInt[] in_features, SymInt[] out_features, Tensor? output_bias, Tensor[] biases, " \
  "float epsilon"
// The weights are those of qkv, of the output projection and of the MLP, layer after layer.
#define SPECDEC_DECODER_LAYERS_ARGUMENTS(caches)                                              \
  "Tensor x, Tensor[] norms, Tensor[] weights, SymInt[] in_features, SymInt[] out_features, " \
  "Tensor[] qkv_biases, Tensor[] output_biases, Tensor[] mlp_biases, Tensor[] head_norms, "   \
  "Tensor cos, Tensor sin, " caches                                                           \
  " caches, Tensor positions, Tensor mask, float scale, "                                     \
  "float epsilon, bool every_layer"

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def("norm_qkv_rope(" SPECDEC_NORM_QKV_ROPE_ARGUMENTS ") -> (Tensor, Tensor, Tensor)");
  m.def("validate_norm_qkv_rope(" SPECDEC_NORM_QKV_ROPE_ARGUMENTS ") -> ()");
  m.def("output_norm_mlp(" SPECDEC_OUTPUT_NORM_MLP_ARGUMENTS ") -> Tensor");
  m.def("validate_output_norm_mlp(" SPECDEC_OUTPUT_NORM_MLP_ARGUMENTS ") -> ()");
  m.def("decoder_layers_(" SPECDEC_DECODER_LAYERS_ARGUMENTS("Tensor(a!)[]") ") -> Tensor");
  m.def("validate_decoder_layers_(" SPECDEC_DECODER_LAYERS_ARGUMENTS("Tensor[]") ") -> ()");
}
SPECDEC_IMPLEMENT_CPU(norm_qkv_rope)
SPECDEC_VALIDATE(norm_qkv_rope, check_inputs)
SPECDEC_IMPLEMENT_CPU(output_norm_mlp)
SPECDEC_VALIDATE(output_norm_mlp, check_output_norm_mlp)
SPECDEC_IMPLEMENT_CPU(decoder_layers_)
SPECDEC_VALIDATE(decoder_layers_, check_decoder_layers)

}  // namespace
}  // namespace specdec
