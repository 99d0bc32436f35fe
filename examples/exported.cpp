// A layer's kernels from C++ without Python or PyTorch. Of ConvTranspose2d(64, 32, 4, stride=2, padding=1):
//
//   upconv export --layer "64,32,4,stride=2,padding=1" --input 8x64x64x64 --arch 90a --c -o layer.cu
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -o exported exported.cpp layer.cu && ./exported
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "layer.h"

static constexpr int BATCH = 8, CIN = 64, COUT = 32, SIZE = 64, KERNEL = 4, STRIDE = 2, PADDING = 1;
static constexpr int OUT = (SIZE - 1) * STRIDE - 2 * PADDING + KERNEL;

static void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

static std::vector<float> drawn(size_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = std::rand() / float(RAND_MAX) - 0.5f;
  return values;
}

static void* on_device(const std::vector<float>& values) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, values.size() * sizeof(float)));
  check(cudaMemcpy(memory, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice));
  return memory;
}

// Output (n, o, h, w) by the formula: along each axis output p, tap k and input i meet where p + padding = i * stride + k.
static double expected(const std::vector<float>& x, const std::vector<float>& weight, int n, int o, int h, int w) {
  double sum = 0;
  for (int c = 0; c < CIN; c++)
    for (int kh = 0; kh < KERNEL; kh++)
      for (int kw = 0; kw < KERNEL; kw++) {
        const int ih = h + PADDING - kh, iw = w + PADDING - kw;
        if (ih < 0 || iw < 0 || ih % STRIDE || iw % STRIDE || ih / STRIDE >= SIZE || iw / STRIDE >= SIZE) continue;
        sum += double(x[((n * CIN + c) * SIZE + ih / STRIDE) * SIZE + iw / STRIDE]) *
               weight[((c * COUT + o) * KERNEL + kh) * KERNEL + kw];
      }
  return sum;
}

int main() {
  const std::vector<float> x = drawn(BATCH * CIN * SIZE * SIZE), weight = drawn(CIN * COUT * KERNEL * KERNEL);
  std::vector<float> y(BATCH * COUT * OUT * OUT);
  const int size[] = {SIZE, SIZE};
  void *workspace = nullptr, *out = on_device(y);
  check(cudaMalloc(&workspace, layer_forward_workspace(BATCH, size)));
  check(layer_forward(on_device(x), on_device(weight), nullptr, out, workspace, BATCH, size, nullptr));
  check(cudaMemcpy(y.data(), out, y.size() * sizeof(float), cudaMemcpyDeviceToHost));  // waits for the kernels
  double worst = 0;
  for (int i = 0; i < 1000; i++) {
    const int n = std::rand() % BATCH, o = std::rand() % COUT, h = std::rand() % OUT, w = std::rand() % OUT;
    worst = std::fmax(worst, std::fabs(y[((n * COUT + o) * OUT + h) * OUT + w] - expected(x, weight, n, o, h, w)));
  }
  std::printf("largest error of 1000 outputs: %.1e\n", worst);
  return worst < 1e-2 ? 0 : 1;  // operands are rounded to TF32
}
