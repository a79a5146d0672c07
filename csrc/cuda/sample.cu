#include "cuda/filter.cuh"
#include "cuda/launch.cuh"
#include "specdec/sample.h"

namespace specdec {
namespace {

struct SampleJob {
  SampleParams p;
  CudaPlan plan;
  Slots slots;
  unsigned long long* tickets;  // [R], row-parallel
  uint64_t launch;
};

// One row, read through one slot.
struct SampleTask {
  Params params;
  RowView row;
  Slot slot;
  RaceNoise noise;
  bool filtered;

  __device__ SampleTask(const SampleParams& p, int64_t r, const Slot& slot)
      : params(params_of(p.sampling, r)),
        row(p.logits, r, 0, p.vocab),
        slot(slot),
        noise{static_cast<uint64_t>(p.seeds[r]), static_cast<uint64_t>(p.positions[r]), p.stream},
        filtered(params.temperature > 0 && params.filters(p.vocab)) {}
};

__device__ Want want(const SampleParams& p, const SampleTask& task) {
  if (task.params.temperature == 0) return Want::kArgmax;
  return p.race ? Want::kRace : Want::kMass;
}

__device__ void write(const Team& team, const SampleParams& p, int64_t r, int64_t token,
                      double logprob, double logsumexp, float threshold, int32_t status) {
  if (team.rank != 0 || thread_id() != 0) return;
  p.tokens[r] = token;
  p.logprobs[r] = static_cast<float>(logprob);
  p.logsumexp[r] = logsumexp;
  p.threshold[r] = threshold;
  p.status[r] = status;
}

__device__ int64_t draw(const Team& team, const SampleTask& task, const SpanMasses& masses,
                        const Law& law, double u) {
  int64_t rest;
  const int64_t span = masses.choose(team, u, rest);
  float values[kPerLane];
  read_span(task.row, span, values);
  weigh(values, {task.slot.maxima[span], rate_of(law.inv_t), law.threshold});
  return span * kSpan + span_pick(values, task.row.wide(), rest);
}

// The slot is filled.
__device__ void finish(Team& team, const SampleParams& p, int64_t r) {
  const SampleTask& task = team.task<SampleTask>();
  if (!task.params.valid()) return write(team, p, r, -1, 0, 0, 0, kBadParameter);
  const int64_t spans = task.row.spans();
  Law law = slot_law(team, task.slot, spans, task.params.temperature);
  if (!law.sound) return write(team, p, r, -1, 0, 0, 0, kTargetNotFinite);
  if (law.point) {
    return write(team, p, r, argmax(team, task.slot, spans, law.max), 0, 0, law.max, 0);
  }
  if (task.filtered) {
    filter_law(team, task.row, task.slot, task.params, want(p, task), task.noise, law);
  }
  const SpanMasses masses(team, task.slot, spans, law.max, law.inv_t);
  law.log_sum = log(masses.sum());
  const RaceNoise& noise = task.noise;
  const int64_t token =
      p.race ? race_winner(team, task.slot, spans, law)
             : draw(team, task, masses, law, uniform(noise.seed, noise.position, noise.stream));
  write(team, p, r, token, law.logprob(at(task.row, token)),
        static_cast<double>(law.max) * law.inv_t + law.log_sum, law.threshold, 0);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    sample_kernel(const __grid_constant__ SampleJob job) {
  wait_for_inputs();
  Team team = Team::mine();
  const bool parallel = job.plan.parallel;
  const int parts = job.plan.parts;
  const int64_t first = blockIdx.x / team.size, teams = gridDim.x / team.size;
  // Row-lazy: two slots a team, because a block that is ahead fills the next one.
  int64_t slot = parallel ? first / parts : first * 2;
  for (int64_t r = first / parts; r < job.p.num_rows; r += teams) {
    SampleTask& task = team.task<SampleTask>();
    __syncthreads();
    if (thread_id() == 0) task = SampleTask(job.p, r, job.slots[slot]);
    __syncthreads();
    if (task.params.valid()) {
      fill_slot(team, task.row, task.slot, task.filtered ? Want::kMass : want(job.p, task),
                inverse_temperature(task.params.temperature), task.noise,
                static_cast<int>(first % parts), parts);
    }
    if (!parallel) {
      team.sync();
      slot ^= 1;
    } else if (!last_team(team, job.tickets + r, job.launch, parts)) {
      return;
    }
    finish(team, job.p, r);
  }
}

}  // namespace

int plan_sample_cuda(const SampleParams& p, const CudaRequest& request, CudaPlan* plan) {
  Device device;
  const cudaError_t status = current_device(sample_kernel, &device);
  if (status != cudaSuccess) return status;
  const SamplingParams& s = p.sampling;
  const bool wide = s.top_ks != nullptr || s.top_ps != nullptr || s.min_ps != nullptr ||
                    s.top_k > 0 || s.top_p < 1 || s.min_p > 0;
  const int64_t spans = spans_of(p.vocab);
  *plan = make_plan(request, device, p.num_rows, 1, spans, wide);
  const int64_t slots = plan->parallel ? p.num_rows : 2 * plan->teams;
  plan->workspace_bytes =
      slots * Slots::bytes(spans, needs_ranks(p.sampling, p.race)) + (p.num_rows + 1) / 2 * 16;
  return cudaSuccess;
}

int sample_cuda(const SampleParams& p, const CudaPlan& plan, void* workspace, void* stream) {
  if (p.num_rows == 0) return cudaSuccess;
  Device device;
  const cudaError_t status = current_device(sample_kernel, &device);
  if (status != cudaSuccess) return status;
  SampleJob job = {};
  job.p = p;
  job.plan = plan;
  job.tickets = static_cast<unsigned long long*>(workspace);
  // Whole sixteens of bytes before the slots.
  job.slots = {static_cast<char*>(workspace) + (p.num_rows + 1) / 2 * 16, spans_of(p.vocab),
               needs_ranks(p.sampling, p.race)};
  job.launch = next_launch();
  return launch_teams(sample_kernel, job, plan, device, stream);
}

}  // namespace specdec
