// The ring of STAGES that one thread fills by the tensor copy engine (of `joined` warps, from another ring) and
// consumers empty: shared by `joined`, `subpixel`, `pairs`, `implicit` and `phases`.
struct alignas(64) TensorMap { u64 opaque[16]; };       // a CUtensorMap; <cuda.h> does not compile under NVRTC

template <int COUNT>
struct CursorOf {                                       // a place in a ring of COUNT stages, and the parity of its phase
  u32 stage, parity;
  __device__ __forceinline__ void next() {
    if (++stage == COUNT) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void move(u32 by) {
    u32 at = stage + by;
    stage = at % COUNT;
    parity ^= at / COUNT & 1;
  }
};
typedef CursorOf<STAGES> Cursor;

// What no matrix instruction reads any more, by its barrier; 0: nothing.
__device__ __forceinline__ void give_back(u32 barrier, int lane) {
  __syncwarp();
  if (lane == 0 && barrier) barrier_arrive(barrier);
}

// One thread: a box whose first element has these coordinates, innermost first; its bytes count for the barrier.
__device__ __forceinline__ void load_box(u32 to, const TensorMap& map, int a, int b, int c, int d, int e, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];\n"
      ::"r"(to), "l"(&map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(barrier) : "memory");
}
