#pragma once
// Shared by the bindings of decoder layers and of what runs them: their checks, and the weights
// that the kernels take.
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "arguments/kv.h"
#include "specdec/decoder_layer.h"
#include "torch/arguments/linear.h"

namespace specdec {

void check_like(const char* name, const Tensor& t, const Tensor& of, const char* of_name);
// Hidden states [B, n, C].
void check_hidden(const char* name, const Tensor& t);
void check_weight(const std::string& name, const Tensor& panels, int64_t out_features,
                  int64_t in_features, const Tensor& of, const char* of_name);
// The first half of a layer, whose input x has `hidden` numbers for each token.
void check_norm_qkv_rope(const Tensor& x, int64_t hidden, const Tensor& norm,
                         const std::vector<Tensor>& qkv, const std::vector<int64_t>& in_features,
                         const std::vector<int64_t>& out_features, const Tensor& cos,
                         const Tensor& sin, const std::vector<Tensor>& biases,
                         const std::vector<Tensor>& head_norms, double epsilon);
// What follows attention, whose output has `heads` numbers for each token.
void check_mlp(const Tensor& residual, int64_t hidden, int64_t heads, const Tensor& norm,
               const Tensor& output, const std::vector<Tensor>& mlp,
               const std::vector<int64_t>& in_features, const std::vector<int64_t>& out_features,
               const std::optional<Tensor>& output_bias, const std::vector<Tensor>& biases,
               double epsilon);
// All that decoder_layers_ takes; gives the memory of the caches.
Extents check_decoder_layers(
    const Tensor& x, const std::vector<Tensor>& norms, const std::vector<Tensor>& weights,
    const std::vector<int64_t>& in_features, const std::vector<int64_t>& out_features,
    const std::vector<Tensor>& qkv_biases, const std::vector<Tensor>& output_biases,
    const std::vector<Tensor>& mlp_biases, const std::vector<Tensor>& head_norms, const Tensor& cos,
    const Tensor& sin, const std::vector<Tensor>& caches, const Tensor& positions,
    const Tensor& mask, double scale, double epsilon, bool every_layer);

PackedWeight weight_of(const Tensor& panels, const Tensor* bias, int64_t out_features);

// Layers that have been checked, as the kernels take them. What lies in memory that is `written` is
// copied. The weights are those of qkv, of the output projection and of the MLP, layer after layer.
class DecoderLayers {
 public:
  DecoderLayers(const Extents& written, std::vector<Tensor> norms, std::vector<Tensor> weights,
                const std::vector<int64_t>& out_features, std::vector<Tensor> qkv_biases,
                std::vector<Tensor> output_biases, std::vector<Tensor> mlp_biases,
                std::vector<Tensor> head_norms, const std::vector<Tensor>& caches);
  // The layers and caches of parameters, which are valid as long as this object.
  void set(DecoderLayersParams& p) const;

 private:
  std::vector<Tensor> held_;
  std::vector<DecoderLayerWeights> layers_;
  std::vector<KvTensor> caches_;
};

}  // namespace specdec
