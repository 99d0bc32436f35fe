#include "wgrad.cuh"

// Adds records of sums, [split][tile][tap][ci][co] (WgradShape). A lane has a sum, a warp of eight every eighth split.
template <class C>
__global__ void __launch_bounds__(256)
add_records(const float* __restrict__ records, typename WgradShape<C>::Bits* __restrict__ weight, int splits) {
  using S = WgradShape<C>;
  constexpr int SUMS = S::SUMS_BYTES / 4;
  __shared__ float parts[8][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, index = blockIdx.x * 32 + lane;
  float sum = 0;
#pragma unroll 4
  for (int i = warp; i < splits && index < S::TILES * SUMS; i += 8) sum += records[(long long)i * (S::TILES * SUMS) + index];
  parts[warp][lane] = sum;
  __syncthreads();
  typename S::Work work;
  S::take_work(work, index / SUMS);
  const int tap = index % SUMS / S::SUMS_OF_TAP, ci = index % SUMS % S::SUMS_OF_TAP / S::SUMS_PITCH, co = index % SUMS % S::SUMS_OF_TAP % S::SUMS_PITCH;
  const int kd = work.tap_d + tap / (C::taps_h * C::taps_w), kh = work.tap_h + tap / C::taps_w % C::taps_h, kw = work.tap_w + tap % C::taps_w;
  const bool has = index < S::TILES * SUMS && ci < C::block_ci && work.ci + ci < C::cin && co < C::block_co && work.co + co < C::cout;
  if (warp > 0 || !has || kd >= C::kernel_d || kh >= C::kernel_h || kw >= C::kernel_w) return;
  for (int i = 1; i < 8; i++) sum += parts[i][lane];
  const long long row = (work.group * C::cin + work.ci + ci) * C::cout + work.co + co;
  weight[row * S::TAPS + (kd * C::kernel_h + kh) * C::kernel_w + kw] = S::Number::bits(sum);
}
